//! A bar chart of the ratios, drawn by hand: a bar is a rectangle and two words.

use std::fmt::Write as _;

use super::Row;

const LINE: usize = 18;
const LEFT: f64 = 330.0;
const WIDTH: f64 = 900.0;
/// Bars are cut off here; the number beside them is not.
const MOST: f64 = 3.0;

/// One bar for each row that has a ratio.
pub(super) fn svg(rows: &[Row]) -> String {
    let bars: Vec<_> = rows
        .iter()
        .filter_map(|row| Some((row, row.ratio?, row.ratio_range?)))
        .collect();
    let height = (bars.len() + 3) * LINE;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <text x=\"8\" y=\"{LINE}\">Ratios: more is better, but in w5, where it is times longer. \
         The thin line is the range of the rounds.</text>\n"
    );
    let scale = (WIDTH - LEFT - 60.0) / MOST;
    let place = |ratio: f64| LEFT + ratio.min(MOST) * scale;
    for (number, (row, ratio, [low, high])) in bars.into_iter().enumerate() {
        let y = (number + 2) * LINE;
        let (top, middle, text) = (y + 3, y + LINE / 2, y + 13);
        let colour = if row.subject == "laneway" {
            "#2563eb"
        } else {
            "#94a3b8"
        };
        let (from, to) = (place(low), place(high));
        let (width, after) = (place(ratio) - LEFT, place(ratio.max(high)) + 6.0);
        let label = format!("{} {} {}", row.workload, row.queue_type, row.subject);
        let bar_height = LINE - 6;
        // Writing to a string cannot fail.
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{text}\" text-anchor=\"end\">{label}</text>\
             <rect x=\"{LEFT}\" y=\"{top}\" width=\"{width:.1}\" height=\"{bar_height}\" fill=\"{colour}\"/>\
             <line x1=\"{from:.1}\" x2=\"{to:.1}\" y1=\"{middle}\" y2=\"{middle}\" stroke=\"#111\"/>\
             <text x=\"{after:.1}\" y=\"{text}\">{ratio:.2}</text>",
            LEFT - 8.0
        );
    }
    let one = place(1.0);
    let _ = writeln!(
        svg,
        "<line x1=\"{one}\" x2=\"{one}\" y1=\"{}\" y2=\"{height}\" stroke=\"#dc2626\" \
         stroke-dasharray=\"3 3\"/>\n</svg>",
        2 * LINE
    );
    svg
}
