//! Coming back: what is parked is listed and replayed, for a program that has been mended.

use std::time::Duration;

use laneway::Bus;
use laneway::parked::{ParkedEntry, ParkedList};

use crate::work::{Stopped, Work};

/// Replays everything that is parked and waits until it is handled. Returns what was parked.
///
/// # Errors
/// When the run is to end early.
pub(crate) async fn replay(bus: &Bus, orders: &str, work: &Work) -> Result<ParkedList, Stopped> {
    let fail = |error: &dyn std::error::Error| work.fail(error.to_string());
    let parked = bus.parked(orders).map_err(|error| fail(&error))?;
    let list = parked.list().await.map_err(|error| fail(&error))?;
    // After a signal too it goes on to its end: dropped, it could leave an event in both queues.
    let report = parked.replay_all().await.map_err(|error| fail(&error))?;
    eprintln!("{} events replayed to a mended program", report.replayed);
    work.until("replayed events to be handled", |counts| {
        counts.replayed >= report.replayed
    })
    .await?;
    Ok(list)
}

/// Prints what became of each poison event. Its key is shown by a fingerprint.
pub(crate) fn print(list: &ParkedList, work: &Work) {
    println!(
        "{:36}  {:16}  {:11}  {:11}  {:>8}  {:>6}  then",
        "parked event", "key", "defect", "parked as", "attempts", "held"
    );
    for entry in &list.messages {
        println!("{}", line(entry, work));
    }
    if list.more {
        println!("… and more: a list ends there");
    }
}

fn line(entry: &ParkedEntry, work: &Work) -> String {
    let or_unknown = |text: Option<&str>| text.unwrap_or("?").to_owned();
    let id = entry.message_id.as_ref();
    let (defect, held, then) = match work.fate(id) {
        Some(fate) => (
            format!("{:?}", fate.defect).to_lowercase(),
            match fate.held {
                Duration::ZERO => "-".to_owned(),
                held => format!("{:.1} s", held.as_secs_f64()),
            },
            if fate.is_handled {
                "replayed and handled"
            } else {
                "NOT HANDLED"
            },
        ),
        None => ("none".to_owned(), String::new(), "NOT EXPECTED"),
    };
    format!(
        "{:36}  {:16}  {defect:11}  {:11}  {:>8}  {held:>6}  {then}",
        or_unknown(id.map(|id| id.as_str())),
        or_unknown(entry.key.as_deref()),
        or_unknown(entry.reason.as_deref()),
        or_unknown(
            entry
                .attempts
                .map(|attempts| attempts.to_string())
                .as_deref()
        ),
    )
}
