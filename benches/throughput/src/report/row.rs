//! Rows: medians and ranges of a subject's rounds, and its ratio to what BENCH compares it with.

use serde::Serialize;

use super::spread;
use crate::child::Outcome;
use crate::options::Workload;
use crate::rounds::{Results, passes};
use crate::subject::{QueueType, Subject, Work};
use crate::suite::{Compared, Part, Suite};

/// A row. Figures are medians over the rounds; ratios are medians of the ratios within each round. A row
/// whose ledger failed in any round has no figures.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Row {
    pub(crate) workload: String,
    /// `classic`, `quorum`, `none`, or a database.
    pub(crate) queue_type: &'static str,
    pub(crate) subject: &'static str,
    /// The database's version, and what a commit waits for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) database: Option<String>,
    pub(crate) messages_per_second: Option<f64>,
    pub(crate) ratio: Option<f64>,
    pub(crate) ratio_to: Option<String>,
    pub(crate) cpu_us_per_message: Option<f64>,
    pub(crate) p99_ms: Option<f64>,
    /// The subject kept what it promises in every round: nothing lost, the parked set exact, and, unless
    /// `keeps_order` is false, order.
    pub(crate) ledger_ok: bool,
    /// Whether the subject promises order per key.
    pub(crate) keeps_order: bool,
    /// First effects that came after a later one of their key, in all rounds together. `None` for inserts of a
    /// subject without order: what reads them back for the ledger does so side by side.
    pub(crate) inversions: Option<u64>,
    /// Pairs of runs of a key at once; `None` as above.
    pub(crate) overlaps: Option<u64>,
    pub(crate) duplicates: u64,
    pub(crate) messages_per_second_range: Option<[f64; 2]>,
    pub(crate) ratio_range: Option<[f64; 2]>,
    /// Its processor time divided by that of `ratio_to`.
    pub(crate) cpu_ratio: Option<f64>,
    pub(crate) p50_ms: Option<f64>,
    pub(crate) p999_ms: Option<f64>,
    /// W4: the rate at a steady pace, divided by that of the run without poison.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) steady_ratio: Option<f64>,
    /// p99 divided by p99 of the run without poison (W4), or of `ratio_to` (W7).
    pub(crate) p99_ratio: Option<f64>,
    pub(crate) resident_mib: Option<f64>,
    /// What went wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) failure: Option<String>,
    #[serde(skip)]
    pub(crate) workload_id: Workload,
}

/// The rows of a suite.
pub(crate) fn rows(
    suite: &Suite,
    queue_type: QueueType,
    database: Option<&str>,
    results: &Results,
) -> Vec<Row> {
    let mut subjects: Vec<_> = results.runs.keys().map(|(subject, _)| *subject).collect();
    subjects.dedup();
    let mut rows = Vec::new();
    for &subject in &subjects {
        rows.push(row(suite, queue_type, results, subject, suite.compared));
        if (suite.workload, subject) == (Workload::W2, Subject::Laneway) {
            let cumulative = Compared::To(Subject::RawCumulative);
            rows.push(row(suite, queue_type, results, subject, cumulative));
        }
        if subject == Subject::DurableLaneway
            && subjects.iter().any(|other| other.is_durable_peer())
        {
            rows.push(row(
                suite,
                queue_type,
                results,
                subject,
                Compared::ToBestPeer,
            ));
        }
    }
    for row in &mut rows {
        row.database = database.map(str::to_owned);
    }
    rows
}

/// A figure of each round of a part; `None` if the part was not run, or any of its runs has no figure.
fn each(
    results: &Results,
    subject: Subject,
    part: Part,
    figure: impl Fn(&Outcome) -> f64,
) -> Option<Vec<f64>> {
    let runs = results.runs.get(&(subject, part))?;
    runs.iter()
        .map(|run| match run {
            Ok(outcome) if passes(subject, outcome) => Some(figure(outcome)),
            _ => None,
        })
        .collect()
}

/// The figure of the best of the other libraries, round by round; those without figure are not among them.
fn best_peer(
    results: &Results,
    figure: impl Fn(&Outcome) -> f64,
    better: impl Fn(f64, f64) -> f64,
) -> Option<Vec<f64>> {
    let subjects = results.runs.keys().map(|(subject, _)| *subject);
    subjects
        .filter(|subject| subject.is_durable_peer())
        .filter_map(|subject| each(results, subject, Part::Main, &figure))
        .reduce(|best, other| {
            let pairs = best.into_iter().zip(other);
            pairs.map(|(best, other)| better(best, other)).collect()
        })
}

fn ratios(of: Option<&Vec<f64>>, to: Option<&Vec<f64>>) -> Option<[f64; 3]> {
    let ratios: Vec<_> = of?.iter().zip(to?).map(|(of, to)| of / to).collect();
    spread(&ratios)
}

fn row(
    suite: &Suite,
    queue_type: QueueType,
    results: &Results,
    subject: Subject,
    compared: Compared,
) -> Row {
    let rate = |outcome: &Outcome| outcome.verdict.per_second;
    let cpu = |outcome: &Outcome| outcome.cpu_us;
    let latency = |at: usize| move |outcome: &Outcome| outcome.verdict.latency_ms[at];
    let of = |part, figure: &dyn Fn(&Outcome) -> f64| each(results, subject, part, figure);
    let runs = results.runs.iter().filter(|((of, _), _)| *of == subject);
    let runs: Vec<_> = runs.flat_map(|(_, runs)| runs).collect();
    let ledger_ok = runs
        .iter()
        .all(|run| run.as_ref().is_ok_and(|run| passes(subject, run)));
    let name = subject.name();
    let rates = of(Part::Main, &rate);
    let processor = of(Part::Main, &cpu);
    let (base, base_cpu, ratio_to) = match compared {
        Compared::To(other) => (
            each(results, other, Part::Main, rate),
            each(results, other, Part::Main, cpu),
            other.name().to_owned(),
        ),
        Compared::ToBestPeer => (
            best_peer(results, rate, f64::max),
            best_peer(results, cpu, f64::min),
            "best peer".to_owned(),
        ),
        Compared::ToIdeal => (Some(results.ideal.clone()), None, "ideal".to_owned()),
        Compared::ToPlain => (
            of(Part::Plain, &rate),
            of(Part::Plain, &cpu),
            format!("{name} without poison"),
        ),
        Compared::TimesPlain => (
            of(Part::Plain, &rate),
            None,
            format!("{name} without the slow key"),
        ),
    };
    let ratio = match compared {
        Compared::TimesPlain => ratios(base.as_ref(), rates.as_ref()),
        _ => ratios(rates.as_ref(), base.as_ref()),
    };
    let median = |values: Option<Vec<f64>>| Some(round(spread(&values?)?[0]));
    let range = |values: [f64; 3]| [round(values[1]), round(values[2])];
    let per_second = rates.as_deref().and_then(spread).filter(|_| ledger_ok);
    let ratio = ratio.filter(|_| ledger_ok);
    let resident = |outcome: &Outcome| outcome.resident_mib.unwrap_or(f64::NAN);
    let work = suite.durable.map(|durable| durable.work);
    let is_mixed = matches!(work, Some(Work::Mixed { .. }));
    let paced = if is_mixed { Part::Main } else { Part::Paced };
    let base_p99 = match compared {
        Compared::To(other) if is_mixed => each(results, other, Part::Main, latency(1)),
        _ => of(Part::PlainPaced, &latency(1)),
    };
    let p99_ratio = ratios(of(paced, &latency(1)).as_ref(), base_p99.as_ref());
    let steady_ratio = ratios(
        of(Part::Paced, &rate).as_ref(),
        of(Part::PlainPaced, &rate).as_ref(),
    );
    let is_order_seen = subject.keeps_order() || !matches!(work, Some(Work::Insert { .. }));
    let verdicts = || {
        runs.iter()
            .filter_map(|run| Some(&run.as_ref().ok()?.verdict))
    };
    Row {
        workload: suite.name.clone(),
        workload_id: suite.workload,
        queue_type: match (suite.workload, suite.durable, queue_type) {
            (_, Some(durable), _) => durable.database.name(),
            (Workload::W10, ..) => "none",
            (.., QueueType::Classic) => "classic",
            (.., QueueType::Quorum) => "quorum",
        },
        subject: name,
        database: None,
        messages_per_second: per_second.map(|rates| round(rates[0])),
        messages_per_second_range: per_second.map(range),
        ratio: ratio.map(|ratio| round(ratio[0])),
        ratio_range: ratio.map(range),
        ratio_to: Some(ratio_to),
        cpu_ratio: ratios(processor.as_ref(), base_cpu.as_ref()).map(|ratio| round(ratio[0])),
        cpu_us_per_message: median(processor),
        p50_ms: median(of(paced, &latency(0))),
        p99_ms: median(of(paced, &latency(1))),
        p999_ms: median(of(paced, &latency(2))),
        steady_ratio: steady_ratio.map(|ratio| round(ratio[0])),
        p99_ratio: p99_ratio.map(|ratio| round(ratio[0])),
        resident_mib: median(of(Part::Main, &resident)).filter(|mib| mib.is_finite()),
        ledger_ok,
        keeps_order: subject.keeps_order(),
        inversions: is_order_seen.then(|| verdicts().map(|verdict| verdict.inversions).sum()),
        overlaps: is_order_seen.then(|| verdicts().map(|verdict| verdict.overlaps).sum()),
        duplicates: verdicts().map(|verdict| verdict.duplicates).sum(),
        failure: runs.iter().find_map(|run| match run {
            Ok(outcome) if !passes(subject, outcome) => Some(outcome.verdict.words.clone()),
            Ok(_) => None,
            Err(what) => Some(what.clone()),
        }),
    }
}

/// Four digits that mean something.
fn round(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let digits = 10_f64.powf(3.0 - value.abs().log10().floor());
    (value * digits).round() / digits
}
