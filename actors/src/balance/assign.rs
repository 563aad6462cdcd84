//! Who owns which shard: a function of the members alone.
//!
//! Owns [`assign`]. Every instance computes it for itself, so it must be the same in every process and
//! release, whatever the order in which members were heard of; golden values in the tests keep it.

use crate::port::MemberId;

/// Its own seed, so that nothing else that is hashed falls in step with it.
const SEED: u64 = 0x6c61_6e65_7761_795f; // "laneway_"

/// The owner of each shard: rendezvous hashing with a capacity.
///
/// Each pair of member and shard has a score, a hash. The pairs are gone through from the highest
/// score to the lowest; a shard goes to the first member that still has room. There is room for
/// ⌊shards / members⌋ each, and for one more with as many members as the division leaves over.
///
/// Promises: each shard has one owner; two members never differ by more than one shard; neither the
/// order of `members` nor a repetition changes anything. With no member the answer is empty.
///
/// Does not promise the fewest moves. When a member joins or leaves, its own shards move, and some
/// others because the room of their owners changed: a function of the members alone cannot avoid
/// that. What is measured stands beside the test `a_join_or_leave_moves_little_more_than_it_must`.
pub fn assign(members: &[MemberId], shards: usize) -> Vec<MemberId> {
    let mut members = members.to_vec();
    members.sort_unstable();
    members.dedup();
    if members.is_empty() {
        return Vec::new();
    }
    let room = shards / members.len();
    let mut left_over = shards % members.len();
    let mut pairs: Vec<_> = (0..members.len())
        .flat_map(|member| (0..shards).map(move |shard| (member, shard)))
        .map(|(member, shard)| (score(members[member], shard), member, shard))
        .collect();
    // Equal scores are next to impossible; the rest of the tuple decides them in the same way everywhere.
    pairs.sort_unstable_by(|one, other| other.cmp(one));

    let mut owners = vec![None; shards];
    let mut owned = vec![0; members.len()];
    for (_, member, shard) in pairs {
        if owners[shard].is_some() {
            continue;
        }
        if owned[member] == room && left_over > 0 {
            left_over -= 1;
        } else if owned[member] >= room {
            continue;
        }
        owned[member] += 1;
        owners[shard] = Some(members[member]);
    }
    // None is without an owner: it would have been refused by all members, so all would be full, and the
    // room of all together is exactly the number of shards.
    owners.into_iter().flatten().collect()
}

fn score(member: MemberId, shard: usize) -> u64 {
    let mut bytes = [0; 24];
    bytes[..16].copy_from_slice(&member.as_u128().to_le_bytes());
    bytes[16..].copy_from_slice(&(shard as u64).to_le_bytes());
    xxhash_rust::xxh3::xxh3_64_with_seed(&bytes, SEED)
}
