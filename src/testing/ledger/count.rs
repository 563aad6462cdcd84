//! From a history to its figures.
//!
//! Promises one pass over the sorted events: n log n time, and besides the events only the runs of
//! one key in memory. Pure: names no clock and no file.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::io;
use std::time::Duration;

use super::event::{Event, History, Kind};
use super::examples::{EXAMPLES, Examples};
use super::figures::Figures;

/// Where a run without a known end ends.
pub(super) const NEVER: u64 = u64::MAX;

/// One run, from its start to its end, its process's death or [`NEVER`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Interval {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) seq: u64,
    pub(super) attempt: u32,
    pub(super) pid: u32,
    pub(super) ok: bool,
}

/// When each process died; a process id may have died several times.
struct Deaths(HashMap<u32, Vec<u64>>);

impl Deaths {
    fn new(deaths: &[(u32, u64)]) -> Self {
        let mut by_pid: HashMap<u32, Vec<u64>> = HashMap::new();
        for (pid, t) in deaths {
            by_pid.entry(*pid).or_default().push(*t);
        }
        by_pid.values_mut().for_each(|times| times.sort_unstable());
        Self(by_pid)
    }

    /// The first death of the process at or after a time.
    fn after(&self, pid: u32, t: u64) -> Option<u64> {
        let times = self.0.get(&pid)?;
        times
            .get(times.partition_point(|death| *death < t))
            .copied()
    }
}

/// Counts.
pub(super) fn figures(history: History) -> io::Result<Figures> {
    let History {
        keys,
        mut events,
        deaths,
        torn,
    } = history;
    let deaths = Deaths::new(&deaths);
    let times = |kinds: &'static [Kind]| {
        let of_kind = events.iter().filter(|event| kinds.contains(&event.kind));
        of_kind.map(|event| Duration::from_nanos(event.t))
    };
    let ends = &[Kind::Succeeded, Kind::Failed];
    let mut figures = Figures {
        torn,
        first_publish: times(&[Kind::Published]).min(),
        last_publish: times(&[Kind::Published]).max(),
        first_start: times(&[Kind::Start]).min(),
        last_end: times(ends).max(),
        ..Figures::default()
    };
    let origin = events.iter().map(|event| event.t).min().unwrap_or(0);
    // Stable: a start and its end in the same nanosecond stay as they were recorded.
    events.sort_by_key(|event| (event.key, event.seq, event.pid, event.attempt, event.t));

    let mut examples = Examples::new(origin);
    let mut runs = Vec::new();
    let mut firsts = Vec::new();
    for of_key in events.chunk_by(|a, b| a.key == b.key) {
        let name = keys.name(of_key[0].key);
        runs.clear();
        firsts.clear();
        for of_message in of_key.chunk_by(|a, b| a.seq == b.seq) {
            let from = runs.len();
            for of_attempt in of_message.chunk_by(|a, b| (a.pid, a.attempt) == (b.pid, b.attempt)) {
                figures.unended += pair(of_attempt, &deaths, &mut runs)
                    .map_err(|end| end_without_start(name, &end))?;
            }
            let of_message_runs = &runs[from..];
            if let Some(first) = count_message(of_message, of_message_runs, &mut figures) {
                firsts.push(first);
            }
            if is_lost(of_message, of_message_runs) {
                figures.lost += 1;
                examples.lost(name, of_message[0].seq, of_message_runs.len());
            }
        }
        figures.inversions += inversions(&mut firsts, |late, early| {
            examples.inversion(name, late, early);
        });
        figures.overlaps += overlaps(&mut runs, |a, b| examples.overlap(name, a, b));
    }
    figures.examples = examples.into_lines();
    Ok(figures)
}

/// Makes runs of the starts and ends of one message, process and attempt number; returns how many
/// of them never ended. An end belongs to the earliest open start of the same life of the process,
/// else to the earliest open start: a killer may have recorded the death before the process was
/// quite dead. An end without a start comes back as the error.
fn pair(events: &[Event], deaths: &Deaths, runs: &mut Vec<Interval>) -> Result<u64, Event> {
    let mut open: VecDeque<u64> = VecDeque::new();
    let run = |event: &Event, start, end, ok| Interval {
        start,
        end,
        seq: event.seq,
        attempt: event.attempt,
        pid: event.pid,
        ok,
    };
    for event in events {
        match event.kind {
            Kind::Start => open.push_back(event.t),
            Kind::Succeeded | Kind::Failed => {
                let alive = |start: &u64| {
                    deaths
                        .after(event.pid, *start)
                        .is_none_or(|death| death >= event.t)
                };
                let index = open.iter().position(alive).unwrap_or(0);
                let start = open.remove(index).ok_or(*event)?;
                runs.push(run(event, start, event.t, event.kind == Kind::Succeeded));
            }
            Kind::Published | Kind::Parked | Kind::Discarded | Kind::Skipped => {}
        }
    }
    let mut unended = 0;
    for start in open {
        let death = deaths.after(events[0].pid, start);
        unended += u64::from(death.is_none());
        runs.push(run(&events[0], start, death.unwrap_or(NEVER), false));
    }
    Ok(unended)
}

fn end_without_start(key: &str, end: &Event) -> io::Error {
    let Event {
        seq, attempt, pid, ..
    } = end;
    let text = format!(
        "an end without a start: key {key:?} sequence {seq} attempt {attempt} of process {pid}"
    );
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// Counts one message, and returns its first successful run.
fn count_message(events: &[Event], runs: &[Interval], figures: &mut Figures) -> Option<Interval> {
    let has = |kind| events.iter().any(|event| event.kind == kind);
    let first = runs
        .iter()
        .filter(|run| run.ok)
        .min_by_key(|run| order(run));
    let successes = runs.iter().filter(|run| run.ok).count() as u64;
    let published = has(Kind::Published);
    figures.attempts += runs.len() as u64;
    figures.handled += u64::from(first.is_some());
    figures.duplicates += successes.saturating_sub(1);
    figures.published += u64::from(published);
    figures.parked += u64::from(has(Kind::Parked));
    figures.discarded += u64::from(has(Kind::Discarded));
    figures.skipped += u64::from(has(Kind::Skipped));
    figures.unpublished +=
        u64::from(!published && (first.is_some() || ended_without_effect(events)));
    first.copied()
}

fn is_lost(events: &[Event], runs: &[Interval]) -> bool {
    let published = events.iter().any(|event| event.kind == Kind::Published);
    published && !ended_without_effect(events) && !runs.iter().any(|run| run.ok)
}

fn ended_without_effect(events: &[Event]) -> bool {
    events
        .iter()
        .any(|event| matches!(event.kind, Kind::Parked | Kind::Discarded | Kind::Skipped))
}

/// By the end. Two that end in the same nanosecond: the one that started first, then the lower
/// sequence, so that a clock too coarse to tell them apart makes no inversion.
fn order(run: &Interval) -> (u64, u64, u64) {
    (run.end, run.start, run.seq)
}

fn inversions(firsts: &mut [Interval], mut found: impl FnMut(&Interval, &Interval)) -> u64 {
    firsts.sort_unstable_by_key(order);
    let mut count = 0;
    let mut highest: Option<Interval> = None;
    for run in firsts.iter() {
        match &highest {
            Some(high) if run.seq < high.seq => {
                count += 1;
                found(run, high);
            }
            _ => highest = Some(*run),
        }
    }
    count
}

/// Sweeps over the starts, keeping the runs that have not ended yet, by their end.
fn overlaps(runs: &mut [Interval], mut found: impl FnMut(&Interval, &Interval)) -> u64 {
    // By the end too: a run of no length goes before the others that start with it, and has left
    // the heap when they come, for they do not overlap with it.
    runs.sort_unstable_by_key(|run| (run.start, run.end));
    let mut count = 0;
    let mut running: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    for (index, run) in runs.iter().enumerate() {
        while let Some(Reverse((end, _))) = running.peek() {
            if *end > run.start {
                break;
            }
            running.pop();
        }
        count += running.len() as u64;
        for Reverse((_, other)) in running.iter().take(EXAMPLES) {
            found(&runs[*other], run);
        }
        running.push(Reverse((run.end, index)));
    }
    count
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;

    /// A history written by hand: process 1 unless another is named, sequence as the test says.
    #[derive(Default)]
    struct Written(History);

    impl Written {
        fn event(
            mut self,
            t: u64,
            pid: u32,
            kind: Kind,
            key: &str,
            seq: u64,
            attempt: u32,
        ) -> Self {
            let key = self.0.keys.number(key);
            self.0.events.push(Event {
                t,
                seq,
                key,
                pid,
                attempt,
                kind,
            });
            self
        }

        fn published(self, key: &str, seqs: &[u64]) -> Self {
            seqs.iter().fold(self, |written, seq| {
                written.event(0, 1, Kind::Published, key, *seq, 0)
            })
        }

        fn run(self, key: &str, seq: u64, attempt: u32, time: Range<u64>, kind: Kind) -> Self {
            self.start(1, key, seq, attempt, time.start)
                .event(time.end, 1, kind, key, seq, attempt)
        }

        fn ok(self, key: &str, seq: u64, time: Range<u64>) -> Self {
            self.run(key, seq, 1, time, Kind::Succeeded)
        }

        fn start(self, pid: u32, key: &str, seq: u64, attempt: u32, t: u64) -> Self {
            self.event(t, pid, Kind::Start, key, seq, attempt)
        }

        fn died(mut self, pid: u32, t: u64) -> Self {
            self.0.deaths.push((pid, t));
            self
        }

        fn figures(self) -> Figures {
            figures(self.0).expect("a history that can be read")
        }
    }

    #[test]
    fn a_published_message_without_success_and_without_an_outcome_is_lost() {
        let figures = Written::default()
            .published("a", &[1, 2, 3, 4, 5, 6])
            .ok("a", 1, 1..2)
            .event(3, 1, Kind::Parked, "a", 2, 0)
            .event(3, 1, Kind::Discarded, "a", 3, 0)
            .event(3, 1, Kind::Skipped, "a", 4, 0)
            .run("a", 5, 1, 4..5, Kind::Failed)
            .figures();
        assert_eq!((figures.published, figures.handled), (6, 1));
        let ended = (figures.parked, figures.discarded, figures.skipped);
        assert_eq!(ended, (1, 1, 1));
        // 5 only failed, 6 never ran.
        assert_eq!(figures.lost, 2);
        assert_eq!(figures.per_second(), None);
        assert!(
            figures.examples[0].contains("sequence 5, 1 runs"),
            "{figures}"
        );
    }

    #[test]
    fn a_message_handled_and_parked_is_handled_once_and_not_lost() {
        let figures = Written::default()
            .published("a", &[1])
            .ok("a", 1, 1..2)
            .event(3, 1, Kind::Parked, "a", 1, 0)
            .figures();
        let ends = (figures.handled, figures.parked, figures.lost);
        assert_eq!(ends, (1, 1, 0));
    }

    #[test]
    fn a_message_published_twice_is_one_message() {
        let figures = Written::default().published("a", &[1, 1]).figures();
        assert_eq!((figures.published, figures.lost), (1, 1));
    }

    #[test]
    fn what_ended_without_being_published_is_counted_apart() {
        let figures = Written::default()
            .ok("a", 1, 1..2)
            .event(3, 1, Kind::Parked, "b", 1, 0)
            .run("c", 1, 1, 4..5, Kind::Failed)
            .figures();
        assert_eq!((figures.unpublished, figures.lost), (2, 0));
    }

    #[test]
    fn a_retry_is_no_duplicate_and_a_second_success_is_one() {
        let retried = Written::default()
            .published("a", &[1])
            .run("a", 1, 1, 1..2, Kind::Failed)
            .run("a", 1, 2, 3..4, Kind::Failed)
            .run("a", 1, 3, 5..6, Kind::Succeeded);
        let figures = retried.figures();
        assert_eq!((figures.attempts, figures.duplicates), (3, 0));

        let repeated = Written::default()
            .published("a", &[1])
            .ok("a", 1, 1..2)
            .ok("a", 1, 3..4)
            .run("a", 1, 2, 5..6, Kind::Succeeded);
        let figures = repeated.figures();
        assert_eq!((figures.handled, figures.duplicates), (1, 2));
        figures.assert_ordered();
    }

    #[test]
    fn a_first_success_below_an_earlier_one_of_its_key_is_an_inversion() {
        let figures = Written::default()
            .ok("a", 2, 1..2)
            .ok("a", 1, 3..4)
            .ok("a", 4, 5..6)
            .ok("a", 3, 7..8)
            .ok("b", 1, 9..10)
            .figures();
        assert_eq!(figures.inversions, 2);
        assert!(figures.examples[0].contains("sequence 1"), "{figures}");
    }

    #[test]
    fn a_duplicate_or_a_failed_run_is_no_inversion() {
        let figures = Written::default()
            .run("a", 3, 1, 0..1, Kind::Failed)
            .ok("a", 1, 1..2)
            .ok("a", 2, 3..4)
            .ok("a", 1, 5..6)
            .run("a", 3, 2, 7..8, Kind::Succeeded)
            .figures();
        assert_eq!((figures.inversions, figures.duplicates), (0, 1));
    }

    #[test]
    fn inversions_are_judged_by_the_ends() {
        let figures = Written::default()
            .ok("a", 1, 1..9)
            .ok("a", 2, 2..3)
            .figures();
        assert_eq!((figures.inversions, figures.overlaps), (1, 1));
    }

    #[test]
    fn runs_that_touch_do_not_overlap_and_runs_of_other_keys_never_do() {
        let figures = Written::default()
            .ok("a", 1, 1..2)
            .ok("a", 2, 2..3)
            .ok("b", 1, 1..3)
            .ok("a", 3, 3..3)
            .ok("a", 4, 3..4)
            .figures();
        assert_eq!(figures.overlaps, 0, "{figures}");
    }

    #[test]
    fn overlaps_are_counted_in_pairs() {
        let figures = Written::default()
            .ok("a", 1, 0..10)
            .ok("a", 2, 1..3)
            .ok("a", 3, 2..4)
            .ok("a", 4, 4..5)
            .ok("a", 5, 7..7)
            .figures();
        // 1 with each of the four others, and 2 with 3.
        assert_eq!(figures.overlaps, 5, "{figures}");
    }

    #[test]
    fn a_run_without_an_end_ends_at_the_death_of_its_process() {
        let cut_off = || Written::default().start(2, "a", 1, 1, 1);
        let after = cut_off().died(2, 5).ok("a", 1, 5..6).figures();
        assert_eq!((after.overlaps, after.attempts, after.unended), (0, 2, 0));
        assert_eq!((after.handled, after.duplicates), (1, 0));

        let before = cut_off().died(2, 5).ok("a", 1, 4..6).figures();
        assert_eq!((before.overlaps, before.unended), (1, 0));

        let never = cut_off().died(3, 2).ok("a", 1, 500..600).figures();
        assert_eq!((never.overlaps, never.unended), (1, 1));
    }

    #[test]
    fn a_process_number_that_is_used_again_is_another_process() {
        let figures = Written::default()
            .start(1, "a", 1, 1, 1)
            .died(1, 3)
            .ok("a", 1, 5..6)
            .ok("a", 2, 7..8)
            .figures();
        assert_eq!(
            (figures.overlaps, figures.unended, figures.handled),
            (0, 0, 2)
        );
    }

    #[test]
    fn an_end_without_a_start_is_refused() {
        let written = Written::default().event(1, 1, Kind::Succeeded, "a", 7, 1);
        let error = figures(written.0).expect_err("no start");
        assert!(error.to_string().contains("sequence 7"), "{error}");
    }

    #[test]
    fn times_and_rate_are_those_of_the_record() {
        let ns = |t| Some(Duration::from_nanos(t));
        let second = 1_000_000_000;
        let figures = Written::default()
            .event(second, 1, Kind::Published, "a", 1, 0)
            .event(2 * second, 1, Kind::Published, "a", 2, 0)
            .ok("a", 1, second + 5..2 * second)
            .ok("a", 2, 2 * second..5 * second)
            .figures();
        assert_eq!(figures.first_publish, ns(second));
        assert_eq!(figures.last_publish, ns(2 * second));
        assert_eq!(figures.first_start, ns(second + 5));
        assert_eq!(figures.last_end, ns(5 * second));
        assert_eq!(figures.per_second(), Some(0.5));
    }

    #[test]
    #[should_panic(expected = "lost: key \"a\" sequence 1")]
    fn the_assertion_names_what_went_wrong() {
        Written::default()
            .published("a", &[1])
            .figures()
            .assert_ordered();
    }

    #[test]
    #[should_panic(expected = "proves nothing")]
    fn an_empty_record_is_no_proof() {
        Figures::default().assert_ordered();
    }
}
