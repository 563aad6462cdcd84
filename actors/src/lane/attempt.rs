//! One attempt: the handler's future, run by a task of the [`crew`](super::crew).
//!
//! Promises that the lane hears of the end of every attempt exactly once, *after* the handler's future
//! has returned or was dropped and its permit has been given back: also when the handler panics,
//! exceeds its time-out, is aborted, or when the whole runtime shuts down.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use futures::FutureExt;
use futures::future::{AbortHandle, AbortRegistration, Abortable};

use super::runs::RunId;
use super::{LaneLink, ToLane};
use crate::endpoint::{self, Endpoint};
use crate::envelope::Delivery;
use crate::handler::{Context, Failure, FailureKind, panic_text};
use crate::permits::Permit;
use crate::policy::PlanIndex;
use crate::port::{CommitError, Draft, PublishError, Scope};

/// How an attempt ended.
pub(crate) enum RunEnd {
    Handled,
    Failed {
        kind: FailureKind,
        /// That of the failure rule that applies.
        plan: Option<PlanIndex>,
        /// The error's text.
        detail: String,
    },
    /// The handler was not called: the session had ended, or its proof of life was too old. Or it was, and its
    /// session ended before its transaction was known to be committed: nothing can be said of it here.
    NotStarted,
    /// The future was dropped before it had returned.
    Dropped,
}

/// Tells the lane when dropped, so that no way out of the task can forget it.
struct Report {
    endpoint: Arc<Endpoint>,
    delivery: Arc<Delivery>,
    lane: Arc<LaneLink>,
    run: RunId,
    attempt: u32,
    end: RunEnd,
}

impl Report {
    /// Asks the failure rules and shows the error. Here and not in the lane: a rule's condition, and showing
    /// (and dropping) an error, are the application's own code, which may panic or block.
    fn failed(&self, failure: Failure) -> RunEnd {
        let kind = failure.kind();
        let config = &self.endpoint.config;
        let message_type = self.endpoint.handlers.type_of(self.delivery.envelope());
        let plan = config.rules.find(message_type, &failure, &config.name);
        let detail = catch_unwind(AssertUnwindSafe(move || failure.detail()))
            .unwrap_or_else(|_| "the handler failed, and showing its error panicked".to_owned());
        if let Some(attempts) = &self.endpoint.attempts {
            let shown = self.endpoint.redact(&detail, self.delivery.key());
            attempts.failed(&self.delivery, self.attempt, kind, &shown);
        }
        RunEnd::Failed { kind, plan, detail }
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        let mut end = std::mem::replace(&mut self.end, RunEnd::Dropped);
        if matches!(end, RunEnd::Dropped) && std::thread::panicking() {
            // The handler's own panic is caught where it is called; this one came from dropping its
            // future. It counts: an attempt that ends like this would end like this again.
            let text = "dropping the handler's future panicked";
            end = self.failed(Failure::new(FailureKind::Panicked, text));
        }
        self.lane.tell(ToLane::RunEnded(self.run, end));
    }
}

/// An attempt that may start: [`Crew`](super::crew::Crew) runs it.
pub(crate) struct Job {
    endpoint: Arc<Endpoint>,
    delivery: Arc<Delivery>,
    attempt: u32,
    aborted: AbortRegistration,
    // Dropped in this order, should it never run.
    permit: Permit,
    report: Report,
}

impl Job {
    /// Runs the attempt to its end. Aborted, it drops the handler's future before it returns.
    pub(super) async fn run(self) {
        let Self {
            endpoint,
            delivery,
            attempt,
            aborted,
            permit,
            report,
        } = self;
        let attempt = run_attempt(endpoint, delivery, attempt, permit, report);
        // An error means that it was aborted, which its report says.
        let _ = Abortable::new(attempt, aborted).await;
    }
}

/// Prepares an attempt, and the handle by which it is aborted.
pub(super) fn prepare(
    endpoint: &Arc<Endpoint>,
    lane: &Arc<LaneLink>,
    run: RunId,
    delivery: Arc<Delivery>,
    attempt: u32,
    mut permit: Permit,
) -> (Job, AbortHandle) {
    permit.use_up();
    // Made here, so that it reports even if the attempt never runs.
    let report = Report {
        endpoint: Arc::clone(endpoint),
        delivery: Arc::clone(&delivery),
        lane: Arc::clone(lane),
        run,
        attempt,
        end: RunEnd::Dropped,
    };
    let (abort, aborted) = AbortHandle::new_pair();
    let job = Job {
        endpoint: Arc::clone(endpoint),
        delivery,
        attempt,
        aborted,
        permit,
        report,
    };
    (job, abort)
}

/// Ends what surrounds an attempt with it. The handler may have given its context to a task of its own, which must not
/// keep a transaction open.
struct EndsScope(Arc<dyn Scope>);

impl Drop for EndsScope {
    fn drop(&mut self) {
        self.0.end();
    }
}

async fn run_attempt(
    endpoint: Arc<Endpoint>,
    delivery: Arc<Delivery>,
    attempt: u32,
    permit: Permit,
    report: Report,
) {
    // Dropped in the reverse order: first the handler's future, then the permit, last the report.
    let mut report = report;
    let permit = permit;
    // Again, here: the task may have waited for a thread, or the process may have been stopped.
    let may_start = |delivery: &Delivery| {
        let session = delivery.session();
        session.may_start() && !session.is_draining()
    };
    if !may_start(&delivery) {
        report.end = RunEnd::NotStarted;
        return;
    }
    let scope = match &endpoint.attempts {
        None => None,
        Some(attempts) => match attempts.begin(&delivery, attempt).await {
            // And again: counting it may have taken long.
            Ok(scope) if may_start(&delivery) => scope,
            _ => {
                report.end = RunEnd::NotStarted;
                return;
            }
        },
    };
    let _ended = scope.clone().map(EndsScope);
    let timeout = endpoint.config.handler_timeout;
    let cx = Context {
        delivery: Arc::clone(&delivery),
        endpoint: Arc::clone(&endpoint.config.name),
        attempt,
        deadline: timeout.and_then(|bound| Instant::now().checked_add(bound)),
        cancel: Arc::clone(&endpoint.cancel),
        publisher: endpoint.publisher.clone(),
        scope: scope.clone(),
    };
    let called = AssertUnwindSafe(async {
        let running = endpoint.handlers.handle(delivery, cx)?;
        endpoint::scope(&endpoint, running).await
    })
    .catch_unwind();
    let result = match timeout {
        Some(bound) => tokio::time::timeout(bound, called).await,
        None => Ok(called.await),
    };
    let failure = match result {
        Ok(Ok(Ok(returned))) => match conclude(&endpoint, scope, returned).await {
            Ok(()) => None,
            Err(Unfinished::Failed(failure)) => Some(failure),
            Err(Unfinished::SessionEnded) => {
                // Whether it took effect is seen by whoever has the message next.
                report.end = RunEnd::NotStarted;
                return;
            }
        },
        Ok(Ok(Err(failure))) => Some(failure),
        Ok(Err(panic)) => {
            let text = panic_text(&*panic).to_owned();
            Some(Failure::new(FailureKind::Panicked, text))
        }
        // As text: a rule for an error of this type means one that the handler returned.
        Err(elapsed) => Some(Failure::new(FailureKind::TimedOut, elapsed.to_string())),
    };
    report.end = failure.map_or(RunEnd::Handled, |failure| report.failed(failure));
    drop(permit);
}

/// Why an attempt whose handler succeeded is none.
enum Unfinished {
    Failed(Failure),
    SessionEnded,
}

/// The handler has succeeded: its transaction is committed, where it has one, and what it returned is published.
async fn conclude(
    endpoint: &Endpoint,
    scope: Option<Arc<dyn Scope>>,
    returned: Vec<Draft>,
) -> Result<(), Unfinished> {
    if let Some(scope) = scope {
        return scope.commit(returned).await.map_err(|error| match error {
            CommitError::SessionEnded => Unfinished::SessionEnded,
            error => Unfinished::Failed(Failure::transient(error)),
        });
    }
    for Draft {
        message_type,
        envelope,
        key,
    } in returned
    {
        let Some(publisher) = &endpoint.publisher else {
            let error = PublishError::NoDestination(message_type.to_owned());
            return Err(Unfinished::Failed(error.into()));
        };
        let published = publisher.publish(message_type, envelope, key).await;
        published.map_err(|error| Unfinished::Failed(error.into()))?;
    }
    Ok(())
}
