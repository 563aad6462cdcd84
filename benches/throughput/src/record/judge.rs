//! From a record to a verdict, by way of the order ledger.

use std::io::{self, BufWriter, Write};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use laneway::testing::OrderLedger;
use serde::{Deserialize, Serialize};

use super::{Ran, Record};

/// What a run was worth.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Verdict {
    /// Nothing lost, nothing made up, and everything poisoned parked, exactly.
    pub(crate) complete: bool,
    pub(crate) inversions: u64,
    pub(crate) overlaps: u64,
    pub(crate) duplicates: u64,
    /// The ledger's own words, where something is wrong.
    pub(crate) words: String,
    /// Messages of healthy keys for each second between the first start and their last end, or of what was measured
    /// instead.
    pub(crate) per_second: f64,
    /// That time, in seconds.
    pub(crate) seconds: f64,
    /// From publishing to the end of the handler, of healthy keys: half, 99 %, 99.9 %.
    pub(crate) latency_ms: [f64; 3],
}

impl Verdict {
    pub(crate) fn ordered(&self) -> bool {
        self.inversions == 0 && self.overlaps == 0
    }
}

impl Record {
    /// Lets the ledger judge, and counts.
    pub(crate) fn verdict(&self) -> io::Result<Verdict> {
        let folder = tempfile::tempdir()?;
        self.write(&folder.path().join("ledger.jsonl"))?;
        let figures = OrderLedger::merge(folder.path())?;
        let mut parked = self.parked.lock().unwrap_or_else(PoisonError::into_inner);
        parked.sort_unstable();
        let poisoned = self.plan.poisoned();
        let exact = parked.iter().eq(poisoned.iter());
        let complete = figures.lost == 0
            && figures.unpublished == 0
            && exact
            && figures.handled + poisoned.len() as u64 == self.plan.len() as u64;
        let mut verdict = Verdict {
            complete,
            inversions: figures.inversions,
            overlaps: figures.overlaps,
            duplicates: figures.duplicates,
            ..Verdict::default()
        };
        if !complete || !verdict.ordered() {
            let wrong = if exact {
                ""
            } else {
                "\nthe parked set differs"
            };
            verdict.words = format!("{figures}{wrong}");
        }
        self.count(&mut verdict);
        Ok(verdict)
    }

    fn count(&self, verdict: &mut Verdict) {
        let healthy = || {
            let messages = self.plan.messages();
            messages
                .filter(|(key, _)| self.plan.is_healthy(*key))
                .filter_map(|(key, seq)| Some(&self.first[self.plan.index(key, seq)?]))
                .filter(|first| first.ok.load(Ordering::Acquire) == 1)
        };
        let starts = healthy().map(|first| first.start.load(Ordering::Relaxed));
        let ends = healthy().map(|first| first.end.load(Ordering::Relaxed));
        if let (Some(start), Some(end)) = (starts.min(), ends.max()) {
            let handlers = (end - start) as f64 / 1e9;
            let measured = self.ended.get().map(|(_, took)| took.as_secs_f64());
            verdict.seconds = measured.unwrap_or(handlers);
            verdict.per_second = healthy().count() as f64 / verdict.seconds;
        }
        let mut latencies: Vec<u64> = healthy()
            .map(|first| {
                let end = first.end.load(Ordering::Relaxed);
                end.saturating_sub(first.sent.load(Ordering::Relaxed))
            })
            .collect();
        latencies.sort_unstable();
        verdict.latency_ms = [0.5, 0.99, 0.999].map(|share| {
            let at = (latencies.len() as f64 * share) as usize;
            latencies.get(at).or(latencies.last()).copied().unwrap_or(0) as f64 / 1e6
        });
    }

    /// Writes it as the ledger's file of this process.
    fn write(&self, path: &std::path::Path) -> io::Result<()> {
        let mut file = BufWriter::new(std::fs::File::create(path)?);
        let pid = std::process::id();
        let mut event = |name: &str, t: u64, key: u32, seq: u32, rest: std::fmt::Arguments<'_>| {
            writeln!(
                file,
                r#"{{"ev":"{name}","t":{t},"pid":{pid},"key":"{key}","seq":{seq}{rest}}}"#
            )
        };
        let mut run = |ran: Ran| -> io::Result<()> {
            let Ran { key, seq, .. } = ran;
            let (attempt, ok) = (ran.attempt, ran.ok);
            event(
                "start",
                ran.start,
                key,
                seq,
                format_args!(r#","attempt":{attempt}"#),
            )?;
            event(
                "end",
                ran.end,
                key,
                seq,
                format_args!(r#","attempt":{attempt},"ok":{ok}"#),
            )
        };
        for (key, seq) in self.plan.messages() {
            let Some(first) = self.plan.index(key, seq).map(|at| &self.first[at]) else {
                continue;
            };
            if first.runs.load(Ordering::Acquire) > 0 {
                run(Ran {
                    key,
                    seq,
                    attempt: 1,
                    start: first.start.load(Ordering::Relaxed),
                    end: first.end.load(Ordering::Relaxed),
                    ok: first.ok.load(Ordering::Acquire) == 1,
                })?;
            }
        }
        let more = self.more.lock().unwrap_or_else(PoisonError::into_inner);
        more.iter().try_for_each(|ran| run(*ran))?;
        for (key, seq) in self.plan.messages() {
            event("published", 0, key, seq, format_args!(""))?;
        }
        let parked = self.parked.lock().unwrap_or_else(PoisonError::into_inner);
        for &(key, seq) in parked.iter() {
            event("parked", 0, key, seq, format_args!(""))?;
        }
        file.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::Record;
    use crate::workload::{Message, Plan, Shape, Spread};

    fn record(poison: bool) -> std::sync::Arc<Record> {
        Record::of(Plan::of(Shape {
            messages: 1_000,
            keys: 100,
            spread: Spread::Uniform,
            handler: Duration::ZERO,
            poison,
            slow: 0,
            seed: 7,
        }))
    }

    #[test]
    fn all_in_order_is_complete_and_ordered() {
        let record = record(false);
        for (key, seq) in record.plan.messages() {
            record.handle_now(&Message::short(key, seq));
        }
        let verdict = record.verdict().expect("readable");
        assert!(verdict.complete && verdict.ordered(), "{}", verdict.words);
        assert!(verdict.per_second > 0.0);
    }

    #[test]
    fn what_did_not_run_is_lost_and_what_overtook_is_out_of_order() {
        let record = record(false);
        let messages: Vec<_> = record.plan.messages().collect();
        for &(key, seq) in messages.iter().skip(1).rev() {
            record.handle_now(&Message::short(key, seq));
        }
        let verdict = record.verdict().expect("readable");
        assert!(!verdict.complete && !verdict.ordered());
        assert!(verdict.words.contains("lost 1"), "{}", verdict.words);
    }

    #[test]
    fn what_was_measured_counts_and_not_the_handlers() {
        let record = record(false);
        record.measured(Duration::from_secs(10));
        for (key, seq) in record.plan.messages() {
            record.handle_now(&Message::short(key, seq));
        }
        let verdict = record.verdict().expect("readable");
        assert_eq!((verdict.seconds, verdict.per_second), (10.0, 100.0));
    }

    #[test]
    fn poison_must_be_parked_and_nothing_else() {
        let record = record(true);
        let poisoned = record.plan.poisoned();
        for message in record.plan.messages() {
            if !poisoned.contains(&message) {
                record.handle_now(&Message::short(message.0, message.1));
            }
        }
        assert!(!record.verdict().expect("readable").complete);
        let (key, seq) = *poisoned.first().expect("one");
        record.parked(key, seq);
        assert!(record.verdict().expect("readable").complete);
        record.parked(key, seq);
        assert!(!record.verdict().expect("readable").complete);
    }
}
