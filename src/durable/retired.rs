//! Queues whose messages nobody here handles: telling of them, and emptying those that are retired.
//!
//! A retired queue is consumed as any other one is, under its leases, and each message becomes a dead letter. Nothing
//! of it goes through the lanes: what nobody handles has no order to keep.

use std::sync::Arc;
use std::time::Duration;

use laneway_actors::PoisonReason;
use laneway_actors::port::MemberId;
use tracing::{info, warn};

use super::engine::tell_once;
use super::keeper::TTL;
use crate::store::{
    DeadReason, Ending, HoldEnding, Lease, QueueIdentity, QueueOrder, Scope, Sequence, Settlement,
    Shard, Store, StoreError, Stored, WaitingQueue, Window,
};

/// How often a retired queue is looked at: what comes late, or waits for its time, is found then.
const LOOK: Duration = Duration::from_secs(2);
/// Messages that become dead letters at once at most.
const AT_ONCE: u32 = 500;

/// The queues of a bus, as its store sees them.
#[derive(Debug, Default)]
pub(super) struct Queues {
    /// Durable ones with handlers.
    pub(super) handled: Vec<QueueIdentity>,
    /// Those whose messages become dead letters.
    pub(super) retired: Vec<Arc<str>>,
    /// The names of queues with handlers that are not durable.
    pub(super) elsewhere: Vec<Arc<str>>,
}

impl Queues {
    /// What to say of queues that have messages. Pure.
    fn unhandled(&self, waiting: &[WaitingQueue]) -> Vec<String> {
        let mut said = Vec::new();
        for WaitingQueue {
            queue,
            backlog,
            scheduled,
        } in waiting
        {
            let name = &queue.name;
            let is_handled = self.handled.iter().any(|handled| handled.name == *name);
            if is_handled || self.retired.contains(name) {
                continue;
            }
            let count = backlog + scheduled;
            let messages = if count == 1 {
                "message waits"
            } else {
                "messages wait"
            };
            said.push(if self.elsewhere.contains(name) {
                format!(
                    "{count} {messages} in the database for the queue `{name}`, which is not `durable()` here: say so of it until they are handled"
                )
            } else {
                format!(
                    "{count} {messages} in `{name}`, which nobody here handles. If another program does, all is well. If nobody does any more, say `retired_queue(\"{name}\")` on the builder: each becomes a dead letter with the reason `no-handler`"
                )
            });
        }
        said
    }
}

/// Warns of each queue that has messages and no handler here. Not to know is no reason not to start.
pub(super) async fn tell_unhandled(store: &dyn Store, queues: &Queues) {
    match store.waiting_queues().await {
        Ok(waiting) => {
            for what in queues.unhandled(&waiting) {
                warn!(target: "laneway", store = store.name(), "{what}");
            }
        }
        Err(error) => {
            warn!(target: "laneway", store = store.name(), %error, "whether messages wait that nobody here handles is not known");
        }
    }
}

/// Moves the messages of a queue to the dead letters, as long as the store is in use.
pub(super) async fn retire(store: Arc<dyn Store>, me: MemberId, name: Arc<str>) {
    let mut silent = false;
    let mut told_unknown = false;
    let mut known = None;
    loop {
        let looked = async {
            if known.is_none() {
                known = find(&*store, &name).await?;
            }
            match &known {
                Some(queue) => empty(&*store, me, queue).await,
                None => {
                    if !told_unknown {
                        warn!(target: "laneway", queue = %name, "the database knows no queue of the name that `retired_queue` says; check the name, or remove it");
                        told_unknown = true;
                    }
                    Ok(())
                }
            }
        };
        match looked.await {
            Ok(()) => silent = false,
            // Another program has it after all, or retires it too.
            Err(StoreError::LeaseLost { .. }) => {}
            Err(error) => tell_once(&mut silent, &*store, &error, "a retired queue waits"),
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// A queue as whoever had it last has declared it.
async fn find(store: &dyn Store, name: &str) -> Result<Option<QueueIdentity>, StoreError> {
    let Some(queue) = store.declared(name).await? else {
        return Ok(None);
    };
    store.declare(std::slice::from_ref(&queue)).await?;
    Ok(Some(queue))
}

/// Everything that can be had now. What waits for a retry, or belongs to another node, is left for the next look.
async fn empty(store: &dyn Store, me: MemberId, queue: &QueueIdentity) -> Result<(), StoreError> {
    let name = &queue.name;
    if store.count(name).await?.backlog == 0 {
        return Ok(());
    }
    let mut nobody_has_it = true;
    match queue.order {
        QueueOrder::Unordered => bury_and_release(store, store.join(name, me, TTL).await?).await?,
        QueueOrder::Ordered(count) => {
            for shard in (0..count.get()).map(Shard) {
                match store.take(name, shard, me, TTL).await? {
                    Some(lease) => bury_and_release(store, lease).await?,
                    None => nobody_has_it = false,
                }
            }
        }
    }
    if nobody_has_it {
        bury_held(store, name).await?;
    }
    Ok(())
}

async fn bury_and_release(store: &dyn Store, lease: Lease) -> Result<(), StoreError> {
    let buried = bury(store, &lease).await;
    // Also after an error: what is claimed would wait until the lease expires.
    let released = store.release(&lease).await;
    buried.and(released)
}

async fn bury(store: &dyn Store, lease: &Lease) -> Result<(), StoreError> {
    let mut buried = 0;
    loop {
        let found = match lease.scope {
            Scope::Shard(_) => store.read(lease, &Window::of(AT_ONCE)).await?,
            Scope::Shared => store.claim(lease, AT_ONCE).await?,
        };
        if found.is_empty() {
            break;
        }
        let settlements: Vec<_> = found.into_iter().map(dead).collect();
        buried += store.settle(lease, &settlements).await?.settled;
        if !store
            .renew(std::slice::from_ref(lease), TTL)
            .await?
            .is_empty()
        {
            return Err(lease.lost());
        }
    }
    told(&lease.queue, buried);
    Ok(())
}

/// Messages that hold their keys, and would for ever. What follows them is found by the next look.
async fn bury_held(store: &dyn Store, queue: &str) -> Result<(), StoreError> {
    let mut buried = 0;
    loop {
        // Those before are gone.
        let held = store.held(queue, Sequence(0), AT_ONCE).await?;
        if held.is_empty() {
            break;
        }
        for Stored { sequence, .. } in held {
            let ending = HoldEnding::Dead {
                reason: DeadReason::Poison(PoisonReason::NoHandler),
                detail: DETAIL.to_owned(),
            };
            buried += usize::from(store.end_hold(queue, sequence, ending).await?);
        }
    }
    told(queue, buried);
    Ok(())
}

const DETAIL: &str = "its queue is retired: nobody handles it any more";

fn dead(stored: Stored) -> Settlement {
    let (reason, detail) = match stored.broken {
        Some(why) => (DeadReason::Broken, why),
        None => (
            DeadReason::Poison(PoisonReason::NoHandler),
            DETAIL.to_owned(),
        ),
    };
    Settlement {
        sequence: stored.sequence,
        ending: Ending::Dead {
            reason,
            detail,
            failed: Vec::new(),
        },
    }
}

fn told(queue: &str, messages: usize) {
    if messages > 0 {
        info!(target: "laneway", queue, messages, "messages of a retired queue became dead letters");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_with_messages_and_without_a_handler_here_are_told_with_the_way_out() {
        let identity = |name: &str| QueueIdentity {
            name: name.into(),
            order: QueueOrder::Unordered,
        };
        let waiting = ["handled", "retired", "moved", "unknown", "one"].map(|name| WaitingQueue {
            queue: identity(name),
            backlog: if name == "one" { 0 } else { 3 },
            scheduled: 1,
        });
        let queues = Queues {
            handled: vec![identity("handled")],
            retired: vec!["retired".into()],
            elsewhere: vec!["moved".into()],
        };
        let said = queues.unhandled(&waiting);
        let [moved, unknown, one] = &said[..] else {
            panic!("{said:?}")
        };
        assert!(moved.contains("4 messages wait") && moved.contains("`durable()`"));
        assert!(unknown.starts_with("4 messages wait in `unknown`, which nobody here handles"));
        assert!(unknown.contains("retired_queue(\"unknown\")"));
        assert!(one.starts_with("1 message waits in `one`"));
    }
}
