//! One life of one source channel, as everybody sees it.
//!
//! Owns [`SessionState`]: whether the session has ended, and when it was last proven alive. It is
//! shared by the source (which proves), the supervisor (which ends) and the lanes (which ask
//! before each start). From the moment it is marked ended, nothing of it starts (invariant 8).

use std::fmt;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

/// Number of a session, unique within the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(u64);

impl SessionId {
    /// The next unused id.
    pub fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The shared state of one session.
pub struct SessionState {
    id: SessionId,
    /// Which of the endpoint's sources it belongs to.
    shard: usize,
    ended: CancellationToken,
    /// It is to be closed: what runs may finish, nothing more starts.
    draining: AtomicBool,
    /// Time of the last proof of life, in nanoseconds of this process's monotonic clock.
    proven: AtomicU64,
    /// How old a proof may be; `u64::MAX` nanoseconds where the source cannot go away unseen.
    max_age: AtomicU64,
}

impl SessionState {
    /// A new session, proven alive now, whose proof never gets too old until
    /// [`require_proof_every`](Self::require_proof_every) says otherwise.
    pub fn start() -> Arc<Self> {
        Self::of_shard(0)
    }

    /// The same for one of several sources of an endpoint.
    pub(crate) fn of_shard(shard: usize) -> Arc<Self> {
        Arc::new(Self {
            id: SessionId::next(),
            shard,
            ended: CancellationToken::new(),
            draining: AtomicBool::new(false),
            proven: AtomicU64::new(nanos(Instant::now())),
            max_age: AtomicU64::new(u64::MAX),
        })
    }

    /// Its id.
    pub fn id(&self) -> SessionId {
        self.id
    }

    pub(crate) fn shard(&self) -> usize {
        self.shard
    }

    /// Lets nothing start when the last proof of life is older than `age`.
    pub fn require_proof_every(&self, age: Duration) {
        let age = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
        self.max_age.store(age, Ordering::Relaxed);
    }

    /// Records a proof of life: the other side answered a question that was *asked* at `asked`.
    /// (When the answer came says less: it may have lain in a buffer.)
    pub fn prove(&self, asked: Instant) {
        self.proven.fetch_max(nanos(asked), Ordering::Relaxed);
    }

    /// Marks the session ended. Calling it again changes nothing.
    pub fn end(&self) {
        self.ended.cancel();
    }

    /// Nothing of it starts any more, also what waits for something just before its start.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        self.ended.is_cancelled()
    }

    /// Waits until it has ended.
    pub async fn ended(&self) {
        self.ended.cancelled().await;
    }

    /// Whether an attempt may start now: not ended, and the last proof of life is fresh.
    pub fn may_start(&self) -> bool {
        let max_age = self.max_age.load(Ordering::Relaxed);
        !self.ended.is_cancelled() && (max_age == u64::MAX || self.proof_age() <= max_age)
    }

    /// Whether the last proof of life is at most so old.
    pub fn was_proven_within(&self, age: Duration) -> bool {
        u128::from(self.proof_age()) <= age.as_nanos()
    }

    /// In nanoseconds.
    fn proof_age(&self) -> u64 {
        nanos(Instant::now()).saturating_sub(self.proven.load(Ordering::Relaxed))
    }
}

impl fmt::Debug for SessionState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionState")
            .field("id", &self.id)
            .field("ended", &self.has_ended())
            .finish_non_exhaustive()
    }
}

/// Nanoseconds since the first call in this process (`CLOCK_MONOTONIC`: goes on while a process is
/// stopped by a signal, which is what a proof's age must see).
fn nanos(at: Instant) -> u64 {
    static BASE: OnceLock<Instant> = OnceLock::new();
    let base = *BASE.get_or_init(|| at);
    u64::try_from(at.saturating_duration_since(base).as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_starts_after_the_end() {
        let session = SessionState::start();
        assert!(session.may_start());
        session.end();
        assert!(!session.may_start());
    }

    #[test]
    fn nothing_starts_on_an_old_proof_until_a_new_one() {
        let session = SessionState::start();
        session.require_proof_every(Duration::ZERO);
        while session.may_start() {
            std::hint::spin_loop();
        }
        session.require_proof_every(Duration::from_secs(3600));
        assert!(session.may_start());
        assert!(session.was_proven_within(Duration::from_secs(3600)));
        assert!(!session.was_proven_within(Duration::ZERO));
    }
}
