//! The runtime of Laneway: lane actors that run handlers in order within a key and in parallel across keys.
//!
//! This crate decides; the crate `laneway` connects. It knows no broker, no database, no HTTP and no
//! command line. Applications use `laneway`; a program that runs an actix `System` of its own can use the
//! actors directly (see [Embedding](#embedding)).
//!
//! # Glossary
//! One word per thing, everywhere: in code, messages, logs and documentation.
//!
//! | word | means |
//! |---|---|
//! | **message** | a typed payload, `T:` [`Message`], with a stable wire name `T::TYPE` |
//! | **envelope** | a message with its id, type, content type, headers, correlation id, causation id and time of sending: [`Envelope`] |
//! | **delivery** | one handing-over of an envelope by a source. Belongs to one session, is settled at most once: [`Delivery`] |
//! | **source** | where deliveries come from: a RabbitMQ queue, a queue of the embedded broker: [`port::Source`] |
//! | **endpoint** | a named source with handlers, ordering and policy: [`EndpointSpec`] |
//! | **ordering key** | what must stay in order: [`OrderingKey`] |
//! | **keyless** | a delivery without a key: it has no order |
//! | **fingerprint** | what stands for a key wherever it can be read: [`Fingerprint`] |
//! | **lane** | one of the fixed tracks of an endpoint in this process. A key hashes to one lane: [`LaneIndex::of`] |
//! | **shard** | one of the fixed slices of a sharded queue, a queue of its own; a key hashes to one shard: [`ShardIndex::of`] |
//! | **member** | an instance of an endpoint over several shards, as the others of its group know it: [`port::MemberId`] |
//! | **take / give** | subscribe to a shard, active or standing by / drain and close its session, so that the next subscriber becomes active: [`balance`] |
//! | **heir** | the member that a shard should belong to and is given to |
//! | **mapping epoch** | identity of the key-to-queue map of a consistent-hash exchange: [`MappingEpoch`] |
//! | **credit** | permission to hold one more unsettled delivery (the broker's prefetch): `max_in_flight` |
//! | **permit** | permission to run one handler: `concurrency` |
//! | **attempt** | one run of the handler for a message, from 1, counted when the handler is about to start |
//! | **failure** | how an attempt ended that did not succeed: [`Failure`], [`FailureKind`] |
//! | **back-off** | the pause of a key between two attempts: [`Backoff`] |
//! | **failure rule** | what to do about which failures: a condition, then retries, then park or discard: [`FailureRules`] |
//! | **outcome** | how a message ended: handled, parked or discarded: [`Outcome`] |
//! | **settle** | tell the source: acknowledge, or leave it to be given back |
//! | **poison message** | used up its attempts, failed permanently, or cannot be decoded or routed to a handler: [`PoisonReason`] |
//! | **park** | move a poison message durably to its parking place: [`port::Parking`] |
//! | **replay** | publish a parked message to the queue it came from, where it is handled like any other: [`port::ParkedMessages`] |
//! | **barrier** | proof that the source has *processed* the acknowledgements sent before: [`port::Session::barrier`] |
//! | **release** | let a key go on after its poison head has been parked |
//! | **hold** | keep a key waiting behind its poison head until an operator decides, or a bound is reached: [`PoisonMode::BlockKey`] |
//! | **gap** | the hole in a key's sequence left by a message that ended without effect; always reported |
//! | **stuck** | a handler that was aborted and has not ended: its key waits for it, visibly |
//! | **session** | one life of one source channel: [`SessionId`]. Deliveries of an ended session cannot be settled |
//! | **drain** | start nothing new, let running attempts finish, settle, close |
//!
//! # Who watches whom
//! ```text
//! whoever starts them (the bus of `laneway`, or an embedding program)
//!  ├─ ConfigActor            boot: checks the world before anything starts
//!  └─ EndpointSupervisor *   owns the source's sessions, the credits, the acknowledgements, the drain
//!      ├─ Lane × N           performs what its lane machine decides; handlers run as tasks elsewhere
//!      ├─ PoisonHandler      park, confirm, acknowledge, barrier; then the lane releases the key
//!      └─ Balancer           with several shards: hears the group, decides what to take and what to give
//! ```
//! A handler's panic is a failed attempt and goes no further. An actor that panics itself, which is a bug
//! of Laneway, is restarted with its mailbox ([`restart`]); after a lane's restart the session is given up,
//! so that nothing depends on books that may be half changed. An actor past its restart intensity
//! escalates: its endpoint drains and ends as [`EndpointState::Failed`].
//!
//! # Invariants, and the file that owns each
//! 1. At most one running attempt per key in a process. No attempt starts before the previous attempt's
//!    future has returned or was dropped; one that does neither leaves the key stuck.
//!    *(`lane/machine.rs`, `lane/machine/attempts.rs`)*
//! 2. Within a session, a key's messages start in the order of arrival. *(`lane/machine.rs`)*
//! 3. A key that waits delays no other key; a key that runs takes one permit and nothing else.
//!    *(`lane/machine.rs`, `permits.rs`)*
//! 4. A retry happens in place, the head unsettled. A head is never requeued to be retried. *(`policy.rs`,
//!    `lane/machine/attempts.rs`)*
//! 5. A delivery is settled at most once, in its own session, by the supervisor alone.
//!    *(`settlement.rs`, `supervisor/mod.rs`)*
//! 6. After a head that ended without effect its key is released only when parking has durably confirmed
//!    it **and** the source has processed its acknowledgement. *(`poison.rs`, `lane/machine/poison.rs`)*
//! 7. Unsettled deliveries never exceed the credits; memory does not grow with the number of keys.
//!    *(`supervisor/shard.rs`)*
//! 8. From the moment a lost session is seen, nothing of it is started or settled. *(`session.rs`,
//!    `supervisor/shard.rs`)*
//! 9. A handler may fail, panic, hang or block: its lane neither dies nor goes deaf. *(`lane/mod.rs`,
//!    `lane/runs.rs`, `lane/attempt.rs`)*
//! 10. On a drain nothing new starts, running attempts finish until the deadline, acknowledgements are
//!     known to be processed, then the session is closed, which gives the rest back in order with no
//!     attempt counted. *(`supervisor/drain.rs`)*
//! 11. Nothing that Laneway writes (log, event, error, snapshot) contains a key, only its fingerprint.
//!     A handler's own error text appears only in a parked message, with occurrences of the key replaced.
//!     *(`key.rs`, `endpoint.rs`)*
//!
//! # Embedding
//! [`EndpointSupervisor::start`] starts an endpoint in the current thread's actix `System`, with any
//! [`port::Source`]. The [`EndpointHandle`] drains it, and gives the address of the lane that a key belongs
//! to ([`EndpointHandle::lane_of`]). A [`LaneAddr`] takes messages directly: `send` waits for one of the
//! lane's slots, `try_send` hands the delivery back when there is none, a key of another lane is refused
//! with the right index, and during a drain everything is. (The mailbox of an actix actor is no bound.)
//! The example `actix_embedding` shows it.

pub mod balance;
mod balancer;
mod cascade;
pub mod config;
mod endpoint;
mod envelope;
mod handler;
mod holds;
mod key;
mod keyed;
pub mod lane;
mod mapping;
mod message;
mod observe;
mod outcome;
mod permits;
mod poison;
mod policy;
pub mod port;
pub mod restart;
mod rules;
mod session;
mod settlement;
mod supervisor;

pub use balancer::{Balancer, BalancerSpec};
pub use cascade::{Cascade, Drafts, WithKey};
pub use config::{
    ConfigActor, EndpointConfig, EndpointSettings, KeySource, PoisonMode, Problem, VerifyWorld,
};
pub use envelope::{
    Delivery, DeliveryTag, DirectSettle, Envelope, HeaderValue, Headers, Identity, MessageId,
    header,
};
pub use handler::{
    Context, ContextPublisher, Failure, FailureKind, Handler, HandlerSet, Surroundings,
};
pub use key::{
    Fingerprint, Fingerprints, Keyed, LaneCount, LaneIndex, OrderingKey, ShardCount, ShardIndex,
};
pub use keyed::{KeySelector, KeyedMessages};
pub use lane::machine::HoldEnd;
pub use lane::{LaneAddr, SendError};
pub use mapping::{MappingEpoch, MappingWatch};
pub use message::{CodecError, Encoding, Message};
pub use observe::{
    EndpointSnapshot, EndpointState, Event, EventKind, Events, HoldOver, WaitReason, WaitingKey,
};
pub use outcome::{Outcome, PoisonReason};
pub use policy::{Backoff, Plan, PlanIndex, Policy, Verdict};
pub use rules::{FailureRule, FailureRules};
pub use session::{SessionId, SessionState};
pub use supervisor::{
    DrainReport, EndpointHandle, EndpointSpec, EndpointSupervisor, check_endpoint,
};
