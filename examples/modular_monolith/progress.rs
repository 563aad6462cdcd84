//! Looks at the database again and again: it tells nobody when everything is done.

use std::time::{Duration, Instant};

use laneway::store::Store;
use tokio::sync::watch;

use crate::census::waiting;
use crate::tables::Database;

/// Pause between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Pause between two lines for people.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// With nothing placed and nothing handled for so long, nothing will be. A node that was killed is replaced within
/// seconds.
const SILENCE: Duration = Duration::from_secs(60);
/// Messages that may wait before no more orders are placed.
const BACKLOG: u64 = 1_000;

/// Keeps telling whether there are few enough messages for more orders to be placed.
pub(crate) async fn watch_backlog(store: &dyn Store, open: watch::Sender<bool>) {
    let mut looks = tokio::time::interval(LOOK_EVERY);
    loop {
        looks.tick().await;
        // Without an answer nothing changes; the next look may have one.
        if let Ok(waiting) = waiting(store).await {
            open.send_replace(waiting < BACKLOG);
        }
    }
}

/// Waits until so many orders are placed and no message waits.
///
/// # Errors
/// When nothing has happened for a minute, the database's answers included.
pub(crate) async fn until_done(
    database: &Database,
    store: &dyn Store,
    orders: u64,
) -> Result<(), String> {
    let mut looks = tokio::time::interval(LOOK_EVERY);
    let (mut last, mut moved) = (None, Instant::now());
    let mut told = Instant::now();
    loop {
        looks.tick().await;
        let look = async {
            // The orders first. Their messages come with them, so what waits afterwards is all that is left.
            let placed = database.orders().await.map_err(|error| error.to_string())?;
            let waiting = waiting(store).await.map_err(|error| error.to_string())?;
            let effects = database
                .effects()
                .await
                .map_err(|error| error.to_string())?;
            Ok::<_, String>((placed, waiting, effects))
        };
        let looked = look.await;
        if let Ok((placed, waiting, effects)) = looked {
            if placed >= orders && waiting == 0 {
                return Ok(());
            }
            if last.replace((placed, effects)) != Some((placed, effects)) {
                moved = Instant::now();
            }
            if told.elapsed() >= TELL_EVERY {
                told = Instant::now();
                eprintln!(
                    "{placed} of {orders} orders placed, {effects} effects, {waiting} messages wait"
                );
            }
        }
        if moved.elapsed() > SILENCE {
            let why = looked.err().unwrap_or_default();
            return Err(format!(
                "nothing was placed or handled for {SILENCE:?}. {why}"
            ));
        }
    }
}
