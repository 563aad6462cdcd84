//! The first few violations in words, for the one who has to find out why.

use std::time::Duration;

use super::count::{Interval, NEVER};

/// So many violations of each sort are described in words; all are counted.
pub(super) const EXAMPLES: usize = 5;

/// The first few violations in words.
pub(super) struct Examples {
    origin: u64,
    lost: Vec<String>,
    inversions: Vec<String>,
    overlaps: Vec<String>,
}

impl Examples {
    pub(super) fn new(origin: u64) -> Self {
        Self {
            origin,
            lost: Vec::new(),
            inversions: Vec::new(),
            overlaps: Vec::new(),
        }
    }

    pub(super) fn lost(&mut self, key: &str, seq: u64, attempts: usize) {
        if self.lost.len() < EXAMPLES {
            self.lost.push(format!(
                "lost: key {key:?} sequence {seq}, {attempts} runs without success"
            ));
        }
    }

    pub(super) fn inversion(&mut self, key: &str, late: &Interval, early: &Interval) {
        if self.inversions.len() < EXAMPLES {
            let text = format!(
                "inversion: key {key:?}: {} came after {}",
                self.describe(late),
                self.describe(early)
            );
            self.inversions.push(text);
        }
    }

    pub(super) fn overlap(&mut self, key: &str, a: &Interval, b: &Interval) {
        if self.overlaps.len() < EXAMPLES {
            let text = format!(
                "overlap: key {key:?}: {} and {}",
                self.describe(a),
                self.describe(b)
            );
            self.overlaps.push(text);
        }
    }

    /// Times in milliseconds since the first event.
    fn describe(&self, run: &Interval) -> String {
        let ms = |t: u64| Duration::from_nanos(t.saturating_sub(self.origin)).as_secs_f64() * 1e3;
        let end = match run.end {
            NEVER => "never)".to_owned(),
            end => format!("{:.6} ms)", ms(end)),
        };
        format!(
            "sequence {} attempt {} of process {} [{:.6}, {end}",
            run.seq,
            run.attempt,
            run.pid,
            ms(run.start)
        )
    }

    pub(super) fn into_lines(self) -> Vec<String> {
        [self.lost, self.inversions, self.overlaps].concat()
    }
}
