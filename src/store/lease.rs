//! Ownership: leases, and what may be read under one.

use std::sync::Arc;

use laneway_actors::OrderingKey;
use laneway_actors::port::MemberId;

use super::columns::key_hash;
use super::{Sequence, Shard, StoreError};

/// Fencing number of a lease. Only grows, and each is given once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Epoch(pub i64);

/// What a lease gives its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scope {
    /// A whole shard of an ordered queue: nobody else has it.
    Shard(Shard),
    /// A place among those who share an unordered queue: the messages it claims are its own.
    Shared,
}

/// The right to settle messages of one queue. It lasts until another one takes it, which nobody may before
/// it has expired; whoever holds it finds out at the next renewal, and cannot settle from then on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Lease {
    /// The queue.
    pub queue: Arc<str>,
    /// What of it.
    pub scope: Scope,
    /// Who holds it.
    pub owner: MemberId,
    /// Under which number.
    pub epoch: Epoch,
}

impl Lease {
    pub(crate) fn lost(&self) -> StoreError {
        StoreError::LeaseLost {
            queue: self.queue.to_string(),
            epoch: self.epoch.0.unsigned_abs(),
        }
    }

    /// The shard whose rows it is about.
    pub(crate) fn shard(&self) -> Shard {
        match self.scope {
            Scope::Shard(shard) => shard,
            Scope::Shared => Shard(0),
        }
    }
}

/// Who has a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ownership {
    /// The shard.
    pub shard: Shard,
    /// Who took it last, unless it was given back.
    pub owner: Option<MemberId>,
    /// Whether the lease lasts: nobody else may take the shard. Never without an owner.
    pub fresh: bool,
}

/// What to read of a shard: everything but what the reader has or does not want.
#[derive(Debug, Clone)]
pub struct Window {
    skip: Vec<i64>,
    held: Vec<i64>,
    limit: u32,
}

impl Window {
    /// At most `limit` messages.
    pub fn of(limit: u32) -> Self {
        Self {
            skip: Vec::new(),
            held: Vec::new(),
            limit,
        }
    }

    /// Leaves out messages that the reader has already.
    pub fn skipping(mut self, sequences: impl IntoIterator<Item = Sequence>) -> Self {
        self.skip.extend(sequences.into_iter().map(|s| s.0));
        self
    }

    /// Leaves out every message of these keys, and fills the window with others.
    ///
    /// A key is left out by a hash of 64 bits; one that shares it with a held key waits too.
    pub fn holding<'a>(mut self, keys: impl IntoIterator<Item = &'a OrderingKey>) -> Self {
        self.held.extend(keys.into_iter().map(key_hash));
        self
    }

    pub(crate) fn skip(&self) -> &[i64] {
        &self.skip
    }

    pub(crate) fn held(&self) -> &[i64] {
        &self.held
    }

    pub(crate) fn limit(&self) -> i64 {
        i64::from(self.limit)
    }
}
