//! Finds superseded attachments. An attachment is superseded if the same pod has a newer attachment with the same
//! network and interface.
//!
//! If the setup of a sandbox fails, or the runtime loses a sandbox, the runtime creates another sandbox for the same
//! pod. The DEL of the old sandbox may fail in another CNI plugin before it reaches Cadastre's. In that case, the old
//! addresses stay assigned although the pod does not use them any more.
//!
//! # Guarantees
//! - The newest attachment of a pod, network and interface is never superseded. An attachment of the current boot is
//!   newer than an attachment of an earlier boot. Otherwise the order in which the store assigned addresses decides.
//!   The wall clock never decides.
//! - If both attachments were adopted into a new store after the old store was lost, their order is known only if the
//!   published list marks one of them as superseded. If their order is unknown, neither supersedes the other.
//! - Attachments without a pod UID are never superseded, because nothing shows that two of them belong together.
//!
//! # Caveats
//! - A superseded attachment may still exist. Its addresses are released only when the node proves that the old sandbox
//!   is gone (see [`leaks`](super::leaks)).

use std::collections::{BTreeMap, BTreeSet};

use super::snapshot::pod_uid;
use cadastre_node::{Attachment, AttachmentRecord};

/// Returns the attachments that a newer attachment supersedes. `boot` is the id of the current boot.
pub(crate) fn superseded<'a>(
    records: &'a [AttachmentRecord],
    boot: &str,
) -> BTreeSet<&'a Attachment> {
    let mut newest: BTreeMap<Key<'_>, Age> = BTreeMap::new();
    for record in records {
        if let Some(key) = key(record) {
            let age = age(record, boot);
            let newest = newest.entry(key).or_insert(age);
            *newest = age.max(*newest);
        }
    }
    let is_older = |it: &&AttachmentRecord| {
        let newest = key(it).and_then(|key| newest.get(&key));
        newest.is_some_and(|newest| age(it, boot) < *newest)
    };
    let older = records.iter().filter(is_older);
    older.map(|it| &it.attachment).collect()
}

/// Pod UID, network and interface. Of all attachments with the same key, only the newest is not superseded.
type Key<'a> = (&'a str, &'a str, &'a str);

/// How new an attachment is: whether it is of the current boot, and its place in the store's order of assignments. The
/// greater value is newer.
type Age = (bool, u64);

fn key(record: &AttachmentRecord) -> Option<Key<'_>> {
    let uid = pod_uid(record);
    let Attachment {
        network, ifname, ..
    } = &record.attachment;
    (!uid.is_empty()).then_some((uid, network, ifname))
}

fn age(record: &AttachmentRecord, boot: &str) -> Age {
    (record.boot == boot || boot.is_empty(), record.order)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::testing::record;

    fn assigned(id: &str, uid: &str, boot: &str, order: u64) -> AttachmentRecord {
        AttachmentRecord {
            boot: boot.to_owned(),
            order,
            ..record(id, uid, &["10.0.0.1"])
        }
    }

    fn of(records: &[AttachmentRecord]) -> Vec<&str> {
        let all = superseded(records, "boot");
        all.into_iter().map(|it| &*it.container_id).collect()
    }

    #[test]
    fn all_but_the_newest_attachment_of_an_interface_are_superseded() {
        let mut all: Vec<AttachmentRecord> = (0..16)
            .map(|n| assigned(&format!("c{n:02}"), "u1", "boot", n + 2))
            .collect();
        all.reverse();
        let older: Vec<String> = (0..15).map(|n| format!("c{n:02}")).collect();
        assert_eq!(of(&all), older);
        // The wall clock has no influence. Only the order of assignments counts.
        all[0].since_ms = 0;
        assert_eq!(of(&all), older);
        assert!(of(&all[..1]).is_empty(), "a single attachment stays");
    }

    #[test]
    fn another_pod_network_or_interface_supersedes_nothing() {
        let old = assigned("c1", "u1", "boot", 2);
        let newer = |change: fn(&mut AttachmentRecord)| {
            let mut newer = assigned("c2", "u1", "boot", 3);
            change(&mut newer);
            [old.clone(), newer]
        };
        assert_eq!(of(&newer(|_| {})), ["c1"]);
        assert!(of(&newer(|it| it.attachment.ifname = "net1".to_owned())).is_empty());
        assert!(of(&newer(|it| it.attachment.network = "other".to_owned())).is_empty());
        assert!(of(&newer(|it| it.pod.as_mut().unwrap().uid = "u2".to_owned())).is_empty());
        // Nothing shows that two attachments without a pod belong together, so neither supersedes the other.
        let without_pod = [assigned("c1", "", "boot", 2), assigned("c2", "", "boot", 3)];
        assert!(of(&without_pod).is_empty());
    }

    #[test]
    fn attachments_of_this_boot_are_newer_and_adopted_attachments_are_older() {
        let reboot = [
            assigned("c1", "u1", "earlier", 9),
            assigned("c2", "u1", "boot", 2),
        ];
        assert_eq!(of(&reboot), ["c1"]);
        let adopted = [
            assigned("c1", "u1", "boot", 1),
            assigned("c2", "u1", "boot", 1),
        ];
        assert!(of(&adopted).is_empty(), "their order is unknown");
        let [one, two] = adopted;
        let newer = assigned("c3", "u1", "boot", 2);
        assert_eq!(of(&[one, newer, two]), ["c1", "c2"]);
    }
}
