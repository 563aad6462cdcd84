//! What one enqueuing call will do, decided before the database is asked. Pure.
//!
//! Owns the copies within one batch.

use std::collections::HashMap;
use std::sync::Arc;

use super::columns::NewRow;
use super::{NewMessage, Placed, QueueIdentity, QueueOrder, StoreError};

/// A queue as its store knows it.
#[derive(Debug, Clone)]
pub(crate) struct KnownQueue {
    pub(crate) number: i32,
    pub(crate) identity: QueueIdentity,
}

/// A message of the batch that is to be written.
pub(crate) struct PlannedRow {
    /// Its position in the batch.
    pub(crate) position: usize,
    pub(crate) queue: i32,
    /// Whether its queue has order.
    #[cfg_attr(
        not(feature = "postgres"),
        expect(dead_code, reason = "only the locks need it, and SQLite takes none")
    )]
    pub(crate) ordered: bool,
    pub(crate) row: NewRow,
}

/// What a call will do.
pub(crate) struct Plan {
    /// Messages to insert, in the order of the batch.
    pub(crate) rows: Vec<PlannedRow>,
    /// Messages with the id of an earlier one of the batch, but another body.
    pub(crate) reused: Vec<PlannedRow>,
    /// What is known already of each message of the batch.
    pub(crate) placed: Vec<Option<Placed>>,
    pub(crate) queues: Vec<Arc<str>>,
}

impl Plan {
    pub(crate) fn of(
        batch: &[NewMessage],
        known: &HashMap<Arc<str>, KnownQueue>,
    ) -> Result<Self, StoreError> {
        let mut plan = Self {
            rows: Vec::with_capacity(batch.len()),
            reused: Vec::new(),
            placed: vec![None; batch.len()],
            queues: batch.iter().map(|message| message.queue.clone()).collect(),
        };
        let mut first: HashMap<(i32, String), i64> = HashMap::new();
        for (position, message) in batch.iter().enumerate() {
            let queue = known.get(&message.queue).ok_or_else(|| {
                StoreError::refused(format!("the queue `{}` is not declared", message.queue))
            })?;
            let planned = PlannedRow {
                position,
                queue: queue.number,
                ordered: matches!(queue.identity.order, QueueOrder::Ordered(_)),
                row: NewRow::of(message, queue.identity.order)?,
            };
            match first.get(&(planned.queue, planned.row.id.clone())) {
                None => {
                    first.insert((planned.queue, planned.row.id.clone()), planned.row.digest);
                    plan.rows.push(planned);
                }
                Some(digest) if *digest == planned.row.digest => {
                    plan.placed[position] = Some(Placed::Duplicate);
                }
                Some(_) => {
                    plan.placed[position] = Some(Placed::IdReused);
                    plan.reused.push(planned);
                }
            }
        }
        Ok(plan)
    }

    /// What became of each message. Every position has been filled by now.
    pub(crate) fn placed(self) -> Vec<Placed> {
        let placed = self.placed.into_iter();
        placed.map(|p| p.unwrap_or(Placed::Duplicate)).collect()
    }
}
