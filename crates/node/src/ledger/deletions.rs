//! Decides whether an ADD or a DEL of the same attachment was requested first.
//!
//! A container runtime calls DEL after it has killed the process of an ADD that took too long. Yet the ADD may still be
//! in progress, for example in an agent that stalls while the CNI plugin does the DEL directly on the store. So a DEL
//! is remembered for as long as an ADD can be in progress. An ADD that was requested before a remembered DEL is
//! rejected.
//!
//! Times are times since boot, by a clock that all processes share. A reboot ends all operations that are in progress.

use std::time::Duration;

use super::super::ops::{Attachment, Now, OpErrorKind};
use super::super::storage_fault::StorageFault;
use super::Stop;
use super::choose::refuse;
use super::kv::{Kv, KvMut, KvTable};
use super::record::{BootTime, Deletion, attachment_key};
use super::tables::{Read, Write};

/// An ADD that was requested longer ago than this time is rejected. So a DEL need not be remembered for longer than
/// this time. CNI plugins wait for 20 s, callers of the agent's API for 30 s.
const LONGEST: Duration = Duration::from_secs(60);

/// Rejects an ADD that was requested too long ago, or before a DEL of the same attachment.
pub(crate) fn check_add(
    kv: &dyn Kv,
    attachment: &Attachment,
    asked: Duration,
    now: &Now,
    stamp: BootTime,
) -> Result<(), Stop> {
    let Attachment {
        container_id,
        ifname,
        ..
    } = attachment;
    let whose = format!("interface {ifname} of container {container_id}");
    if now.since_boot.saturating_sub(asked) >= LONGEST {
        let text = format!(
            "an address for {whose} was asked for more than {LONGEST:?} ago, and nobody waits for it any more: nothing was given."
        );
        return Err(refuse(OpErrorKind::Busy, text));
    }
    let asked = at(asked, stamp);
    let is_over = kv.deletion(attachment)?.is_some_and(|it| asked < it);
    if is_over {
        let text = format!(
            "{whose} was deleted after an address for it was asked for: nothing was given. Ask again if it is to have one."
        );
        return Err(refuse(OpErrorKind::Busy, text));
    }
    Ok(())
}

/// Remembers a DEL. To keep the table small, also examines the two entries that follow in the table, and deletes those
/// that have expired.
pub(crate) fn remember_del(
    kv: &mut dyn KvMut,
    attachment: &Attachment,
    asked: Duration,
    now: &Now,
    stamp: BootTime,
) -> Result<(), StorageFault> {
    kv.put_boot(now, stamp)?;
    let key = attachment_key(attachment);
    let deletion = at(asked.min(now.since_boot), stamp);
    let before = kv.deletion(attachment)?;
    let latest = before.map_or(deletion, |it| it.max(deletion));
    kv.put_json(KvTable::Deletions, &key, &latest)?;
    let oldest = at(now.since_boot.saturating_sub(LONGEST), stamp);
    let mut after = key;
    for _ in 0..2 {
        // At the end of the table, the search continues with the first entry.
        let next = match kv.next(KvTable::Deletions, &[], Some(after.as_slice()))? {
            None => kv.next(KvTable::Deletions, &[], None)?,
            next => next,
        };
        let Some((next, _)) = next else { break };
        let deletion: Option<Deletion> = kv.json(KvTable::Deletions, &next)?;
        if deletion.is_some_and(|it| it < oldest) {
            kv.drop_key(KvTable::Deletions, &next)?;
        }
        after = next;
    }
    Ok(())
}

fn at(time: Duration, stamp: BootTime) -> Deletion {
    Deletion {
        boot: stamp.boot,
        asked_us: u64::try_from(time.as_micros()).unwrap_or(u64::MAX),
    }
}
