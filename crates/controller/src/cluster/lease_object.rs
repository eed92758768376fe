//! Converts the Lease object from and to the election's record.
//!
//! A renewal replaces the whole object, so labels, annotations and fields of other writers are copied into the new
//! object.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};

use super::intents::WriteIntents;
use super::lease::LeaseRecord;
use cadastre_api::{GAP_ANNOTATION, INTENTS_ANNOTATION, UNSETTLED_ANNOTATION};

/// Lease duration that is assumed if a Lease has no valid duration.
const DEFAULT_DURATION: Duration = Duration::from_secs(15);

/// Reads a Lease leniently: a Lease with missing fields counts as held for [`DEFAULT_DURATION`].
pub(super) fn record(lease: &Lease) -> LeaseRecord {
    let none = LeaseSpec::default();
    let spec = lease.spec.as_ref().unwrap_or(&none);
    let annotations = lease.metadata.annotations.as_ref();
    let seconds = spec
        .lease_duration_seconds
        .and_then(|seconds| u64::try_from(seconds).ok())
        .filter(|seconds| *seconds > 0);
    let holder = spec.holder_identity.clone();
    let transitions = spec.lease_transitions.unwrap_or_default().into();
    let intents = annotations.and_then(|all| all.get(INTENTS_ANNOTATION));
    LeaseRecord {
        holder: Some(holder.unwrap_or_else(|| "unknown".to_owned())).filter(|it| !it.is_empty()),
        lease_duration: seconds.map_or(DEFAULT_DURATION, Duration::from_secs),
        transitions,
        unsettled: annotations.is_some_and(|all| all.contains_key(UNSETTLED_ANNOTATION)),
        intents: intents
            .and_then(|text| WriteIntents::read(text, transitions))
            .map(Arc::new),
        resource_version: lease.metadata.resource_version.clone().unwrap_or_default(),
    }
}

/// Builds the Lease to write. `known` is the Lease as last read. If the write replaces exactly that version, the fields
/// that the election does not use are kept.
pub(super) fn lease(known: Option<&Lease>, wanted: &LeaseRecord, now: Timestamp) -> Lease {
    let version = Some(wanted.resource_version.clone()).filter(|version| !version.is_empty());
    let before =
        known.filter(|lease| version.is_some() && lease.metadata.resource_version == version);
    let mut lease = before.cloned().unwrap_or_default();
    let spec = lease.spec.get_or_insert_default();
    let transitions = i32::try_from(wanted.transitions).unwrap_or(i32::MAX);
    if spec.lease_transitions != Some(transitions) || spec.acquire_time.is_none() {
        spec.acquire_time = Some(MicroTime(now));
    }
    // A free Lease gets an empty holder instead of none, because other tools expect that.
    spec.holder_identity = Some(wanted.holder.clone().unwrap_or_default());
    spec.lease_duration_seconds = i32::try_from(wanted.lease_duration.as_secs()).ok();
    spec.lease_transitions = Some(transitions);
    spec.renew_time = Some(MicroTime(now));
    lease.metadata = ObjectMeta {
        resource_version: version,
        managed_fields: None,
        ..lease.metadata
    };
    let annotations = lease.metadata.annotations.get_or_insert_default();
    annotations.remove(UNSETTLED_ANNOTATION);
    annotations.remove(GAP_ANNOTATION);
    annotations.remove(INTENTS_ANNOTATION);
    if let Some(intents) = &wanted.intents {
        let text = intents.write(wanted.transitions);
        annotations.insert(INTENTS_ANNOTATION.to_owned(), text);
    }
    if wanted.unsettled {
        annotations.insert(UNSETTLED_ANNOTATION.to_owned(), "true".to_owned());
    }
    lease
}

/// Returns the time at which a leader last renewed the Lease. If the Lease records a gap (a time without a leader),
/// returns the time of the last renewal before the gap.
pub(super) fn renewed_at(lease: &Lease) -> Option<Timestamp> {
    let annotations = lease.metadata.annotations.as_ref();
    let before_gap = annotations.and_then(|all| all.get(GAP_ANNOTATION)?.parse().ok());
    before_gap.or_else(|| Some(lease.spec.as_ref()?.renew_time.as_ref()?.0))
}

/// Records in `lease`, which is about to be written, that a gap began at the last renewal in `known`. The gap is
/// recorded in an annotation of its own, and not by keeping the old `spec.renewTime`. With the old time, a renewal
/// would not change the Lease or its resourceVersion, and other candidates would conclude that there is no leader.
pub(super) fn record_gap(known: &Lease, lease: &mut Lease) {
    if let Some(since) = renewed_at(known) {
        let annotations = lease.metadata.annotations.get_or_insert_default();
        annotations.insert(GAP_ANNOTATION.to_owned(), since.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted() -> LeaseRecord {
        LeaseRecord {
            holder: Some("a_1".into()),
            lease_duration: Duration::from_secs(15),
            transitions: 3,
            unsettled: false,
            intents: Some(Arc::default()),
            resource_version: "7".into(),
        }
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    /// Returns the Lease as the API server stores it, with a label of another writer.
    fn stored(wanted: &LeaseRecord, second: i64) -> Lease {
        let mut lease = lease(None, wanted, at(second));
        let label = [("team".to_owned(), "net".to_owned())];
        lease.metadata.labels = Some(label.into());
        lease
    }

    #[test]
    fn a_written_record_is_read_the_same() {
        let free = LeaseRecord {
            holder: None,
            unsettled: true,
            intents: None,
            ..wanted()
        };
        for wanted in [wanted(), free] {
            assert_eq!(record(&lease(None, &wanted, at(1))), wanted);
        }
    }

    #[test]
    fn a_recorded_gap_stays_while_the_lease_is_renewed() {
        let known = stored(&wanted(), 100);
        assert_eq!(renewed_at(&known), Some(at(100)));
        let mut acquired = lease(Some(&known), &wanted(), at(900));
        assert_eq!(renewed_at(&acquired), Some(at(900)));
        record_gap(&known, &mut acquired);
        let mut renewed = lease(Some(&acquired), &wanted(), at(902));
        record_gap(&acquired, &mut renewed);
        assert_eq!(renewed_at(&renewed), Some(at(100)));
        let times = [&acquired, &renewed].map(|it| it.spec.as_ref().unwrap().renew_time.clone());
        assert_eq!(times, [900, 902].map(|it| Some(MicroTime(at(it)))));
        let later = lease(Some(&renewed), &wanted(), at(970));
        assert_eq!(renewed_at(&later), Some(at(970)));
        assert_eq!(later.metadata.labels, known.metadata.labels);
    }

    #[test]
    fn a_renewal_keeps_the_time_of_acquisition_and_what_others_wrote() {
        let known = stored(&wanted(), 1);
        let renewed = lease(Some(&known), &wanted(), at(9));
        assert_eq!(renewed.metadata.labels, known.metadata.labels);
        let spec = renewed.spec.unwrap();
        assert_eq!(
            (spec.acquire_time, spec.renew_time),
            (Some(MicroTime(at(1))), Some(MicroTime(at(9))))
        );
        let next = LeaseRecord {
            transitions: 4,
            ..wanted()
        };
        let acquired = lease(Some(&known), &next, at(30)).spec.unwrap();
        assert_eq!(acquired.acquire_time, Some(MicroTime(at(30))));
    }

    #[test]
    fn intents_that_an_earlier_version_has_kept_are_ignored() {
        let mut lease = stored(&wanted(), 1);
        lease.spec.as_mut().unwrap().lease_transitions = Some(4);
        assert_eq!(record(&lease).intents, None);
    }

    #[test]
    fn fields_of_another_version_of_the_lease_are_not_written() {
        let known = stored(&wanted(), 1);
        let other = LeaseRecord {
            resource_version: "8".into(),
            ..wanted()
        };
        assert_eq!(lease(Some(&known), &other, at(9)).metadata.labels, None);
    }

    #[test]
    fn an_invalid_lease_counts_as_held_for_the_default_duration() {
        let empty = record(&Lease::default());
        assert_eq!(
            (empty.holder.as_deref(), empty.lease_duration),
            (Some("unknown"), DEFAULT_DURATION)
        );
        let mut odd = stored(&wanted(), 1);
        odd.spec.get_or_insert_default().lease_duration_seconds = Some(-3);
        assert_eq!(record(&odd).lease_duration, DEFAULT_DURATION);
    }

    #[test]
    fn the_next_holder_removes_the_annotation_of_unsettled_writes() {
        let known = stored(
            &LeaseRecord {
                holder: None,
                unsettled: true,
                ..wanted()
            },
            1,
        );
        assert!(!record(&lease(Some(&known), &wanted(), at(2))).unsettled);
    }
}
