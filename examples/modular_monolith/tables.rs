//! The application's own tables, beside Laneway's in the same database, and what can be counted in them.
//!
//! Nothing in them forbids a second effect of an order, or one out of sequence: the counts are to show it.

use std::sync::Arc;

use laneway::durable::{HandlerTransaction, TransactionError};
use laneway::prelude::*;
use sqlx::postgres::{PgPoolOptions, Postgres};
use sqlx::sqlite::{Sqlite, SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use sqlx::{Executor as _, Pool};

use crate::orders::{CUSTOMERS, OrderPlaced};
use crate::place::Place;

/// Connections of Orders, and of who counts.
const CONNECTIONS: u32 = 3;

/// The tables, in either database.
#[derive(Clone)]
pub(crate) enum Database {
    Sqlite(Arc<Tables<Sqlite>>),
    Postgres(Arc<Tables<Postgres>>),
}

/// The same code for either database.
macro_rules! on_either {
    ($database:expr, $tables:ident => $do:expr) => {
        match $database {
            Database::Sqlite($tables) => $do,
            Database::Postgres($tables) => $do,
        }
    };
}
pub(crate) use on_either;

/// The tables in one database, with the statements: their text differs by the schema's name.
pub(crate) struct Tables<DB: sqlx::Database> {
    pub pool: Pool<DB>,
    /// How a transaction begins that is going to write.
    pub begin: &'static str,
    pub count_one_more: String,
    pub insert_order: String,
    insert_effects: [String; 2],
    /// Of all names.
    prefix: String,
}

/// What a module does about an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    Shipment,
    Invoice,
}

impl Effect {
    pub(crate) const ALL: [Self; 2] = [Self::Shipment, Self::Invoice];

    fn table(self) -> &'static str {
        match self {
            Self::Shipment => "shipments",
            Self::Invoice => "invoices",
        }
    }
}

impl<DB: sqlx::Database> Tables<DB> {
    fn new(pool: Pool<DB>, begin: &'static str, prefix: String) -> Self {
        let p = &prefix;
        Self {
            pool,
            begin,
            count_one_more: format!(
                "INSERT INTO {p}customers (customer, orders) VALUES ($1, 1) \
                 ON CONFLICT (customer) DO UPDATE SET orders = customers.orders + 1 \
                 WHERE customers.orders < $2 RETURNING orders"
            ),
            insert_order: format!("INSERT INTO {p}orders (customer, number) VALUES ($1, $2)"),
            insert_effects: Effect::ALL.map(|effect| {
                let table = effect.table();
                format!("INSERT INTO {p}{table} (customer, number) VALUES ($1, $2)")
            }),
            prefix,
        }
    }

    /// `row` is the type of a number that rises with every row.
    fn create(&self, row: &str) -> String {
        let p = &self.prefix;
        let effects = Effect::ALL.map(|effect| {
            let table = effect.table();
            format!(
                "CREATE TABLE IF NOT EXISTS {p}{table} \
                 (id {row}, customer bigint NOT NULL, number bigint NOT NULL);"
            )
        });
        format!(
            "CREATE TABLE IF NOT EXISTS {p}customers (customer bigint PRIMARY KEY, orders bigint NOT NULL); \
             CREATE TABLE IF NOT EXISTS {p}orders (customer bigint, number bigint, PRIMARY KEY (customer, number)); {}",
            effects.concat()
        )
    }

    async fn transaction(&self, cx: &Context) -> Result<HandlerTransaction<DB>, TransactionError> {
        cx.transaction::<DB>().await
    }
}

/// What the tables say, over all runs.
pub(crate) struct Tally {
    pub orders: u64,
    /// By [`Effect::ALL`].
    pub effects: [EffectTally; 2],
}

/// What became of one effect of each order.
pub(crate) struct EffectTally {
    /// Orders that have it.
    pub applied: u64,
    /// Rows beyond one for each order: repetitions, and those of orders that do not exist.
    pub surplus: u64,
    /// Orders whose first row comes after that of a later order of their customer.
    pub inversions: u64,
    /// Orders that do not have it.
    pub missing: Vec<OrderPlaced>,
}

impl Database {
    /// Opens the database, which the store has created, and creates the tables where they are missing.
    pub(crate) async fn open(place: &Place) -> Result<Self, sqlx::Error> {
        match place {
            Place::Sqlite { file } => {
                // Commits are durable by SQLite's default. Waiting for the one writer is normal here.
                let options = SqliteConnectOptions::new()
                    .filename(file)
                    .journal_mode(SqliteJournalMode::Wal)
                    .busy_timeout(std::time::Duration::from_secs(20));
                let pool = SqlitePoolOptions::new().max_connections(CONNECTIONS);
                let pool = pool.connect_with(options).await?;
                let tables = Tables::new(pool, "BEGIN IMMEDIATE", String::new());
                let create = tables.create("integer PRIMARY KEY AUTOINCREMENT");
                tables.pool.execute(&*create).await?;
                Ok(Self::Sqlite(Arc::new(tables)))
            }
            Place::Postgres { url, schema } => {
                let pool = PgPoolOptions::new().max_connections(CONNECTIONS);
                let tables = Tables::new(pool.connect(url).await?, "BEGIN", format!("{schema}."));
                let create = tables.create("bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY");
                // Runs that start at the same time would both find a table missing.
                let one_at_a_time = format!(
                    "BEGIN; SELECT pg_advisory_xact_lock(hashtext('{schema}')); {create} COMMIT"
                );
                tables.pool.execute(&*one_at_a_time).await?;
                Ok(Self::Postgres(Arc::new(tables)))
            }
        }
    }

    /// Writes an effect in the transaction of the handler.
    pub(crate) async fn write(
        &self,
        effect: Effect,
        order: &OrderPlaced,
        cx: &Context,
    ) -> Result<(), Failure> {
        on_either!(self, tables => {
            let mut transaction = tables.transaction(cx).await?;
            sqlx::query(&tables.insert_effects[effect as usize])
                .bind(order.customer as i64)
                .bind(order.number as i64)
                .execute(&mut *transaction)
                .await?;
            Ok(())
        })
    }

    /// How many orders each customer has.
    pub(crate) async fn orders_by_customer(&self) -> Result<Vec<u64>, sqlx::Error> {
        let rows: Vec<(i64, i64)> = on_either!(self, tables => {
            let text = format!("SELECT customer, orders FROM {}customers", tables.prefix);
            sqlx::query_as(&text).fetch_all(&tables.pool).await?
        });
        let mut all = vec![0; CUSTOMERS as usize];
        for (customer, orders) in rows {
            all[customer as usize] = orders as u64;
        }
        Ok(all)
    }

    /// The number of orders.
    pub(crate) async fn orders(&self) -> Result<u64, sqlx::Error> {
        self.number("SELECT count(*) FROM {p}orders").await
    }

    /// The number of effects, whichever.
    pub(crate) async fn effects(&self) -> Result<u64, sqlx::Error> {
        let mut all = 0;
        for effect in Effect::ALL {
            let table = effect.table();
            all += self
                .number(&format!("SELECT count(*) FROM {{p}}{table}"))
                .await?;
        }
        Ok(all)
    }

    /// Counts everything. For when nothing runs: each count is of its own moment.
    pub(crate) async fn tally(&self) -> Result<Tally, sqlx::Error> {
        let [shipments, invoices] = Effect::ALL;
        Ok(Tally {
            orders: self.orders().await?,
            effects: [
                self.tally_of(shipments).await?,
                self.tally_of(invoices).await?,
            ],
        })
    }

    async fn tally_of(&self, effect: Effect) -> Result<EffectTally, sqlx::Error> {
        let table = effect.table();
        let fill = |text: &str| text.replace("{effects}", &format!("{{p}}{table}"));
        let rows = self.number(&fill("SELECT count(*) FROM {effects}")).await?;
        let applied = self
            .number(&fill(
                "SELECT count(*) FROM (SELECT customer, number FROM {p}orders INTERSECT \
                 SELECT customer, number FROM {effects}) AS applied",
            ))
            .await?;
        // The ids of a customer's rows rise as their transactions commit: these come one after the other, or else
        // this is what shows it.
        let inversions = self
            .number(&fill(
                "SELECT count(*) FROM (SELECT number, max(number) OVER (PARTITION BY customer ORDER BY id \
                 ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before FROM \
                 (SELECT customer, number, min(id) AS id FROM {effects} GROUP BY customer, number) AS firsts) \
                 AS pairs WHERE number < before",
            ))
            .await?;
        let missing = fill(
            "SELECT customer, number FROM {p}orders EXCEPT SELECT customer, number FROM {effects}",
        );
        let missing: Vec<(i64, i64)> = on_either!(self, tables => {
            let text = missing.replace("{p}", &tables.prefix);
            sqlx::query_as(&text).fetch_all(&tables.pool).await?
        });
        let missing = missing.into_iter().map(|(customer, number)| OrderPlaced {
            customer: customer as u64,
            number: number as u64,
        });
        Ok(EffectTally {
            applied,
            surplus: rows - applied,
            inversions,
            missing: missing.collect(),
        })
    }

    async fn number(&self, text: &str) -> Result<u64, sqlx::Error> {
        let number: i64 = on_either!(self, tables => {
            let text = text.replace("{p}", &tables.prefix);
            sqlx::query_scalar(&text).fetch_one(&tables.pool).await?
        });
        Ok(number as u64)
    }

    pub(crate) async fn close(&self) {
        on_either!(self, tables => tables.pool.close().await);
    }
}
