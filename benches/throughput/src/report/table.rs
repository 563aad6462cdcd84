//! A table: the same in a terminal and on a page.

use super::Row;

/// The rows, ratios first.
pub(crate) fn table(rows: &[&Row]) -> String {
    let mut lines = vec![
        "| queue | subject | ratio (range) | to | messages/s (range) | processor µs/message (ratio) | \
         p50 / p99 / p99.9 ms | MiB | ledger |"
            .to_owned(),
        "|---|---|---|---|---|---|---|---|---|".to_owned(),
    ];
    lines.extend(rows.iter().map(|row| line(row)));
    lines.join("\n")
}

fn line(row: &Row) -> String {
    let [queue, subject] = [row.queue_type, row.subject];
    let ratio = with_range(row.ratio, row.ratio_range, 2);
    let to = row.ratio_to.as_deref().unwrap_or("–");
    let rate = with_range(row.messages_per_second, row.messages_per_second_range, 0);
    let cpu = number(row.cpu_us_per_message, 1);
    let cpu = match row.cpu_ratio {
        Some(ratio) => format!("{cpu} ({ratio:.2})"),
        None => cpu,
    };
    let latencies = [row.p50_ms, row.p99_ms, row.p999_ms].map(|ms| number(ms, 1));
    let mut latency = match row.p99_ms {
        Some(_) => latencies.join(" / "),
        None => "–".to_owned(),
    };
    if let Some(ratio) = row.p99_ratio {
        latency += &format!(" (p99 × {ratio:.2})");
    }
    let resident = number(row.resident_mib, 0);
    let ledger = match (row.ledger_ok, row.keeps_order, row.inversions, row.overlaps) {
        (false, ..) => "FAILED".to_owned(),
        (true, true, ..) => "in order".to_owned(),
        (true, false, Some(inversions), Some(0)) => format!("complete; {inversions} inversions"),
        (true, false, Some(inversions), Some(overlaps)) => {
            format!("complete; {inversions} inversions, {overlaps} overlaps")
        }
        (true, false, ..) => "complete".to_owned(),
    };
    format!(
        "| {queue} | {subject} | {ratio} | {to} | {rate} | {cpu} | {latency} | {resident} | {ledger} |"
    )
}

/// A figure with its range.
pub(super) fn with_range(value: Option<f64>, range: Option<[f64; 2]>, digits: usize) -> String {
    match (value, range) {
        (Some(value), Some([low, high])) => {
            format!("{value:.digits$} ({low:.digits$}–{high:.digits$})")
        }
        _ => "–".to_owned(),
    }
}

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "–".to_owned(), |value| format!("{value:.digits$}"))
}
