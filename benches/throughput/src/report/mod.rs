//! What is said of the results: rows, a table, JSON, a page with a chart.

mod chart;
mod page;
mod row;
mod table;

pub(crate) use page::write;
pub(crate) use row::{Row, rows};
pub(crate) use table::table;

/// The middle value, the least, the most.
fn spread(values: &[f64]) -> Option<[f64; 3]> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = *sorted.get(sorted.len() / 2)?;
    Some([middle, sorted[0], sorted[sorted.len() - 1]])
}
