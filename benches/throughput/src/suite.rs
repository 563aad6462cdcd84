//! Which runs a workload has, for which subjects, and what each is compared with.

use std::time::Duration;

use crate::database::Database;
use crate::options::{Options, Workload};
use crate::subject::{Durable, Subject, Work};
use crate::workload::{Shape, Spread};

/// Different keys.
const KEYS: u32 = 10_000;
/// Messages a second where they are published while the subject runs.
const PACE: u32 = 2_000;
/// The same for durable queues.
const DURABLE_PACE: u32 = 800;
/// The slow consumer gets no more messages than this.
const SEQUENTIAL_AT_MOST: u64 = 5_000;
/// The same where it is to be quick.
const SEQUENTIAL_QUICK: u64 = 2_000;

/// Which of a subject's runs in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    /// Without what the workload is about, to compare with.
    Plain,
    /// The workload.
    Main,
    /// [`Plain`](Self::Plain) while messages are published at a steady pace.
    PlainPaced,
    /// [`Main`](Self::Main) while messages are published at a steady pace.
    Paced,
}

/// A run that every round has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) subject: Subject,
    pub(crate) part: Part,
    pub(crate) shape: Shape,
    pub(crate) per_second: Option<u32>,
    pub(crate) durable: Option<Durable>,
}

/// What a row's ratio is: its own rate divided by that of ….
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compared {
    /// Another subject.
    To(Subject),
    /// A loop that runs one key alone, divided by the share of the top key.
    ToIdeal,
    /// Whoever of the other libraries was the fastest in the round.
    ToBestPeer,
    /// Its own run without poison.
    ToPlain,
    /// The other way round: how many times longer than its own run without the slow key.
    TimesPlain,
}

/// A workload, ready to run.
pub(crate) struct Suite {
    pub(crate) workload: Workload,
    /// As the rows name it.
    pub(crate) name: String,
    pub(crate) cases: Vec<Case>,
    pub(crate) compared: Compared,
    /// W7: what is done, and where.
    pub(crate) durable: Option<Durable>,
}

impl Suite {
    /// The runs of a workload. (W3 has two suites.)
    pub(crate) fn of(workload: Workload, options: &Options) -> Vec<Self> {
        use Subject::{
            HandWrittenHash, HandWrittenMap, Laneway, LocalChannels, LocalLaneway, RawCumulative,
            RawSequential, RawUnordered,
        };
        let messages = options.messages();
        let shape = |handler_ms| Shape {
            messages,
            keys: KEYS,
            spread: Spread::Uniform,
            handler: Duration::from_millis(handler_ms),
            poison: false,
            slow: 0,
            seed: 0,
        };
        let waiting = shape(1);
        let paced = Shape {
            messages: messages.min(10 * u64::from(PACE)),
            ..waiting
        };
        let peers = |subjects: &[Subject]| {
            let mut subjects = subjects.to_vec();
            if options.peers {
                subjects.extend([Subject::RuststreamLapin, Subject::Beavers]);
            }
            subjects
        };
        let suite = |name: &str, compared, subjects: &[Subject], parts: &[(Part, Shape)]| Self {
            workload,
            name: name.to_owned(),
            compared,
            cases: cases(subjects, parts, options.quick),
            durable: None,
        };
        match workload {
            Workload::W1 => {
                let ordered = [RawUnordered, HandWrittenHash, HandWrittenMap, Laneway];
                let mut suite = suite(
                    "w1",
                    Compared::To(RawUnordered),
                    &peers(&ordered),
                    &[(Part::Main, waiting), (Part::Paced, paced)],
                );
                suite.cases.extend(cases(
                    &[RawSequential],
                    &[(Part::Main, waiting)],
                    options.quick,
                ));
                vec![suite]
            }
            Workload::W2 => vec![suite(
                "w2",
                Compared::To(RawUnordered),
                &peers(&[
                    RawUnordered,
                    RawCumulative,
                    HandWrittenHash,
                    HandWrittenMap,
                    Laneway,
                    RawSequential,
                ]),
                &[(Part::Main, shape(0))],
            )],
            Workload::W3 => [1.0, 1.2]
                .map(|s| {
                    let spread = Spread::Zipf(s);
                    suite(
                        &format!("w3-s{s:.1}"),
                        Compared::ToIdeal,
                        &peers(&[HandWrittenHash, HandWrittenMap, Laneway]),
                        &[(Part::Main, Shape { spread, ..waiting })],
                    )
                })
                .into(),
            Workload::W4 => {
                let poisoned = |shape| Shape {
                    poison: true,
                    ..shape
                };
                vec![suite(
                    "w4",
                    Compared::ToPlain,
                    &[HandWrittenMap, Laneway],
                    &[
                        (Part::Plain, waiting),
                        (Part::Main, poisoned(waiting)),
                        (Part::PlainPaced, paced),
                        (Part::Paced, poisoned(paced)),
                    ],
                )]
            }
            Workload::W5 => {
                let others = Shape {
                    messages: 20_000,
                    ..waiting
                };
                let with_slow = Shape {
                    slow: 500,
                    ..others
                };
                let mut subjects = vec![RawUnordered, HandWrittenMap, Laneway];
                if !options.quick {
                    subjects.push(HandWrittenHash);
                }
                vec![suite(
                    "w5",
                    Compared::TimesPlain,
                    &peers(&subjects),
                    &[(Part::Plain, others), (Part::Main, with_slow)],
                )]
            }
            Workload::W7 => durable_suites(options, shape(0)),
            Workload::W10 => {
                // Five times as many as W1 has, and enough to take a while.
                let messages = (5 * messages).max(500_000);
                let shape = Shape {
                    messages,
                    ..shape(0)
                };
                vec![suite(
                    "w10",
                    Compared::To(LocalChannels),
                    &[LocalChannels, LocalLaneway],
                    &[(Part::Main, shape)],
                )]
            }
        }
    }
}

/// W7: inserts, drains and mixed work, each in every database and with whoever is measured there with it.
fn durable_suites(options: &Options, shape: Shape) -> Vec<Suite> {
    let mut suites = Vec::new();
    // Each single one waits for the disk; mixed work takes so many seconds.
    let (single, seconds) = match options.quick {
        true => (2_000, 6),
        false => (5_000, 20),
    };
    for database in options.databases() {
        for (name, work, most) in [
            ("w7-insert-1", Work::Insert { batch: 1 }, single),
            ("w7-insert-100", Work::Insert { batch: 100 }, 50_000),
            ("w7-insert-1000", Work::Insert { batch: 1_000 }, 200_000),
            ("w7-drain-1", Work::Drain { handlers: 1 }, 5_000),
            ("w7-drain-16", Work::Drain { handlers: 16 }, 50_000),
            ("w7-drain-64", Work::Drain { handlers: 64 }, 200_000),
            (
                "w7-mixed",
                Work::Mixed {
                    handlers: 64,
                    per_second: DURABLE_PACE,
                },
                seconds * u64::from(DURABLE_PACE),
            ),
        ] {
            let durable = Durable { database, work };
            let subjects = durable_subjects(durable, options.peers);
            let Some(&first) = subjects.first() else {
                continue;
            };
            let case = |subject| Case {
                subject,
                part: Part::Main,
                shape: Shape {
                    messages: shape.messages.min(most),
                    ..shape
                },
                per_second: None,
                durable: Some(durable),
            };
            suites.push(Suite {
                workload: Workload::W7,
                name: name.to_owned(),
                compared: Compared::To(first),
                cases: subjects.into_iter().map(case).collect(),
                durable: Some(durable),
            });
        }
    }
    suites
}

/// Who is measured, first the one with whom the others are compared.
fn durable_subjects(durable: Durable, with_peers: bool) -> Vec<Subject> {
    use Subject::{
        Awa, DurableLaneway, DurableLanewayTransactional, GraphileWorker, GraphileWorkerKeyed,
        RawSql, Riverqueue,
    };
    let peers: &[Subject] = match durable.database {
        _ if !with_peers => &[],
        Database::Postgres => &[GraphileWorkerKeyed, GraphileWorker, Riverqueue, Awa],
        Database::Sqlite => &[Riverqueue],
    };
    match durable.work {
        Work::Insert { .. } => [&[RawSql, DurableLaneway], peers].concat(),
        // No table written by hand has handlers. Without peers Laneway's own rows are compared with each other.
        Work::Drain { .. } | Work::Mixed { .. } => {
            let (first, others) = peers.split_at(peers.len().min(1));
            [
                first,
                &[DurableLaneway, DurableLanewayTransactional],
                others,
            ]
            .concat()
        }
    }
}

fn cases(subjects: &[Subject], parts: &[(Part, Shape)], quick: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    for &(part, shape) in parts {
        for &subject in subjects {
            let mut shape = shape;
            if subject == Subject::RawSequential {
                let most = match quick {
                    true => SEQUENTIAL_QUICK,
                    false => SEQUENTIAL_AT_MOST,
                };
                shape.messages = shape.messages.min(most);
            }
            let is_paced = matches!(part, Part::Paced | Part::PlainPaced);
            cases.push(Case {
                subject,
                part,
                shape,
                per_second: is_paced.then_some(PACE),
                durable: None,
            });
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn suites(arguments: &[&str]) -> Vec<Suite> {
        let program = ["laneway-bench"].iter();
        let options = Options::parse_from(program.chain(arguments));
        Suite::of(Workload::W7, &options)
    }

    #[test]
    fn quick_measures_all_work_in_sqlite_and_needs_no_server() {
        let suites = suites(&["--quick"]);
        let names: Vec<_> = suites.iter().map(|suite| suite.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "w7-insert-1",
                "w7-insert-100",
                "w7-insert-1000",
                "w7-drain-1",
                "w7-drain-16",
                "w7-drain-64",
                "w7-mixed",
            ]
        );
        for suite in suites {
            let durable = suite.durable.expect("durable");
            assert_eq!(durable.database, Database::Sqlite);
            assert!(suite.cases.iter().all(|case| case.shape.messages <= 10_000));
        }
    }

    #[test]
    fn peers_are_drained_and_compared_with_the_keyed_one() {
        let suites = suites(&["--peers", "--database", "postgres"]);
        assert_eq!(suites.len(), 7);
        let drain = suites.iter().find(|suite| suite.name == "w7-drain-64");
        let drain = drain.expect("a drain");
        assert_eq!(drain.compared, Compared::To(Subject::GraphileWorkerKeyed));
        let subjects: Vec<_> = drain.cases.iter().map(|case| case.subject).collect();
        assert_eq!(
            subjects,
            [
                Subject::GraphileWorkerKeyed,
                Subject::DurableLaneway,
                Subject::DurableLanewayTransactional,
                Subject::GraphileWorker,
                Subject::Riverqueue,
                Subject::Awa,
            ]
        );
    }
}
