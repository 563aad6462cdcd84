//! The figures: what a record proves, in numbers and in words.
//!
//! Owns the definitions of lost, inversion, overlap and duplicate; each is written at its field of
//! [`Figures`]. Does not count: that is [`count`](super::count).

use std::fmt;
use std::time::Duration;

use serde::Serialize;

/// What a ledger recorded, counted. A *message* is a (key, sequence).
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Figures {
    /// Messages recorded as published.
    pub published: u64,
    /// Messages with at least one successful run.
    pub handled: u64,
    /// Messages recorded as parked.
    pub parked: u64,
    /// Messages recorded as discarded.
    pub discarded: u64,
    /// Messages recorded as skipped.
    pub skipped: u64,
    /// Published messages that were neither handled, parked, discarded nor skipped.
    pub lost: u64,
    /// Messages that were handled, parked, discarded or skipped without being recorded as
    /// published: the publisher died before it could say so, or a message was made up.
    pub unpublished: u64,
    /// First successful runs (ordered by their end) with a sequence below an earlier one of their
    /// key.
    pub inversions: u64,
    /// Pairs of runs of one key of which each starts before the other ends. Runs that touch,
    /// one ending in the nanosecond in which the other starts, do not overlap. A run without an
    /// end ends at its process's death; if none is recorded, never (see
    /// [`unended`](Self::unended)).
    pub overlaps: u64,
    /// Successful runs beyond the first for each message.
    pub duplicates: u64,
    /// All runs: successful, failed, unended.
    pub attempts: u64,
    /// Runs without an end and without a death of their process. They overlap with every later run
    /// of their key: a missing [`died`](super::OrderLedger::died) makes figures worse, never
    /// better.
    pub unended: u64,
    /// Last lines of files that were cut off by the end of their writer.
    pub torn: u64,
    /// When the first message was published, on the ledger's clock. Only differences mean
    /// something.
    pub first_publish: Option<Duration>,
    /// When the last message was published.
    pub last_publish: Option<Duration>,
    /// When the first run started.
    pub first_start: Option<Duration>,
    /// When the last run ended.
    pub last_end: Option<Duration>,
    /// The first few lost messages, inversions and overlaps, in words. They name the keys.
    pub examples: Vec<String>,
}

impl Figures {
    /// Whether nothing was lost, no message overtook another of its key, and no two runs of a key
    /// overlapped.
    pub fn is_ordered(&self) -> bool {
        self.lost == 0 && self.inversions == 0 && self.overlaps == 0
    }

    /// Holds the record to the promise of order.
    ///
    /// # Panics
    /// With all figures and the first few violations, when something is lost, inverted or
    /// overlapping; and when nothing at all was recorded, which would prove nothing.
    #[track_caller]
    pub fn assert_ordered(&self) {
        assert!(
            self.published > 0 || self.attempts > 0,
            "nothing was recorded, which proves nothing"
        );
        assert!(self.is_ordered(), "order did not hold\n{self}");
    }

    /// Handled messages for each second from the first publish (else the first start) to the last
    /// end. `None` for a record that is not ordered: a run that fails has no throughput.
    pub fn per_second(&self) -> Option<f64> {
        let span = self.span()?;
        if !self.is_ordered() || self.handled == 0 || span.is_zero() {
            return None;
        }
        Some(self.handled as f64 / span.as_secs_f64())
    }

    fn span(&self) -> Option<Duration> {
        let first = self.first_publish.or(self.first_start)?;
        self.last_end?.checked_sub(first)
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "published {} · handled {} · parked {} · discarded {} · skipped {}",
            self.published, self.handled, self.parked, self.discarded, self.skipped
        )?;
        write!(
            f,
            "lost {} · inversions {} · overlaps {} · duplicates {} · attempts {}",
            self.lost, self.inversions, self.overlaps, self.duplicates, self.attempts
        )?;
        if self.unpublished > 0 {
            write!(
                f,
                "\nunpublished {}: they ended without being recorded as published",
                self.unpublished
            )?;
        }
        if self.unended > 0 {
            write!(
                f,
                "\nunended {}: runs without an end and without a recorded death of their process",
                self.unended
            )?;
        }
        if self.torn > 0 {
            write!(f, "\ntorn last lines {}", self.torn)?;
        }
        if let Some(span) = self.span() {
            write!(f, "\n{:.3} s to the last end", span.as_secs_f64())?;
        }
        if let Some(rate) = self.per_second() {
            write!(f, ", {rate:.0} messages per second")?;
        }
        for example in &self.examples {
            write!(f, "\n  {example}")?;
        }
        Ok(())
    }
}
