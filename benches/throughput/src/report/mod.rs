//! What is said of the results: rows, a table, JSON, a page with a chart.

mod chart;
mod page;
mod row;
mod table;

pub(crate) use page::write;
pub(crate) use row::{Row, rows};
pub(crate) use table::table;

/// The middle value (between two, if their number is even), the least, the most.
fn spread(values: &[f64]) -> Option<[f64; 3]> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    let middle = (upper + sorted[(sorted.len() - 1) / 2]) / 2.0;
    Some([middle, sorted[0], sorted[sorted.len() - 1]])
}

#[cfg(test)]
mod tests {
    use super::spread;

    #[test]
    fn the_middle_of_an_even_number_is_between_two() {
        assert_eq!(spread(&[]), None);
        assert_eq!(spread(&[3.0, 1.0, 2.0]), Some([2.0, 1.0, 3.0]));
        assert_eq!(spread(&[4.0, 1.0]), Some([2.5, 1.0, 4.0]));
    }
}
