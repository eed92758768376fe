//! Tests of the machine's guarantees about what is published.

use super::*;
use crate::addresses::ListOutcome;
use crate::publish::WriteOutcome;
use crate::routes::RoutesReport;
use cadastre_api::{NodeSubnetStatus, ROUTES_READY};

fn failed() -> AgentEvent {
    AgentEvent::Written(WriteOutcome::Failed)
}

/// Reports that the write of the status has failed, and advances the clock beyond the pause after the failure. Returns
/// the effects that follow.
fn after_a_failure(bench: &mut Bench) -> Vec<AgentEffect> {
    bench.on(failed());
    bench.pass(200 * SECOND);
    bench.run()
}

/// Reports that the watch begins a new list of NodeSubnets.
fn list_begins(bench: &mut Bench) {
    bench.on(AgentEvent::Subnet(Change(Restarted { asked: SECOND })));
}

#[test]
fn o11_a_status_is_written_to_the_version_whose_ranges_the_store_has() {
    let mut bench = Bench::seen(blocks(&[A]));
    bench.run_to("hold");
    bench.pass(40 * SECOND);
    bench.subnet(2, blocks(&[A, B]));
    let answer = bench.answer_to(bench.open.clone().unwrap());
    let mut effects = bench.answer(answer);
    effects.extend(bench.run());
    assert_eq!(
        target_versions(&effects)[..1],
        ["1"],
        "the store has one block"
    );
    assert_eq!(target_versions(&after_a_failure(&mut bench)), ["2"]);
}

#[test]
fn o11_a_status_is_written_to_the_listed_version_even_if_it_is_older() {
    let mut bench = Bench::idle(blocks(&[A]));
    bench.subnet(7, blocks(&[A]));
    bench.run_to("hold");
    // The API server was restored to an older state, so the list shows a lower version.
    list_begins(&mut bench);
    bench.subnet(3, blocks(&[A, B]));
    bench.on(AgentEvent::Subnet(Change(Listed)));
    bench.run();
    bench.run();
    assert_eq!(target_versions(&after_a_failure(&mut bench)), ["3"]);
}

#[test]
fn o11_a_listed_version_counts_as_listed_after_the_store_has_failed() {
    let mut bench = Bench::idle(blocks(&[A]));
    bench.subnet(7, blocks(&[A]));
    bench.run();
    list_begins(&mut bench);
    bench.subnet(3, blocks(&[A, B]));
    bench.run_to("hold");
    let full = StoreTrouble {
        text: "no space".to_owned(),
        is_lost: false,
    };
    bench.answer(StoreAnswer::Failed(full));
    bench.run();
    assert_eq!(target_versions(&after_a_failure(&mut bench)), ["3"]);
}

#[test]
fn o12_one_write_of_the_status_and_one_of_the_list_are_under_way() {
    let mut bench = Bench::seen(blocks(&[A]));
    bench.snapshot.attachments = vec![record("c1", "u1", &["10.0.0.9"])];
    bench.pod("u1");
    bench.pass(400 * SECOND);
    for version in 2..5 {
        bench.run();
        bench.pass(400 * SECOND);
        let more = format!("10.0.0.{version}");
        let records = &mut bench.snapshot.attachments;
        records.push(record(&format!("c{version}"), "u1", &[&more]));
        bench.subnet(version, blocks(&[A]));
    }
    bench.run();
    let published = bench.published();
    let count = |what| published.iter().filter(|it| **it == what).count();
    assert_eq!((count("status"), count("list")), (1, 1));
    assert!(bench.machine.is_busy());
    bench.on(failed());
    bench.on(AgentEvent::Listed(ListOutcome::Failed));
    bench.pass(400 * SECOND);
    bench.run();
    let published = bench.published();
    let count = |what| published.iter().filter(|it| **it == what).count();
    assert_eq!((count("status"), count("list")), (1, 1));
}

#[test]
fn the_first_list_of_a_node_is_written_soon_and_with_the_counts_of_its_blocks() {
    for seed in 0..20 {
        let mut bench = Bench::seen(blocks(&[A]));
        let (interval, soon) = (300 * SECOND, 30 * SECOND);
        bench.machine.schedule = Schedule::new(interval, soon, seed, bench.now.since_boot);
        bench.on(AgentEvent::Addresses(Change(Listed)));
        bench.pass(8 * SECOND);
        let effects = bench.run();
        stored(&mut bench, effects);
        bench.published();
        bench.snapshot.attachments = vec![record("c1", "u1", &["10.0.0.9"])];
        bench.snapshot.blocks[0].counts.used = 1;
        bench.on(AgentEvent::Changed);
        bench.pass(SECOND);
        bench.run();
        bench.run();
        let published = bench.published();
        assert!(
            published.contains(&"list") && published.contains(&"status"),
            "{seed}: {published:?}"
        );
    }
}

#[test]
fn the_controller_can_ask_for_longer_intervals() {
    let spec = |seconds: u32| {
        let mut spec = blocks(&[A]);
        spec["statusIntervalSeconds"] = seconds.into();
        spec
    };
    let mut bench = Bench::seen(spec(120));
    let effects = bench.run();
    stored(&mut bench, effects);
    let mut used = 0;
    // Changes a count, which nobody waits for, each second, until a status is written. Returns how long that took.
    let mut next = |bench: &mut Bench| {
        for seconds in 0.. {
            used = (used + 1) % 20;
            bench.snapshot.blocks[0].counts.used = used;
            bench.on(AgentEvent::Changed);
            bench.pass(SECOND);
            let effects = bench.run();
            if stored(bench, effects).is_some() {
                return seconds;
            }
        }
        0
    };
    next(&mut bench);
    let seconds = next(&mut bench);
    assert!((119..=145).contains(&seconds), "{seconds}");
    bench.subnet(u64::MAX, spec(0));
    let seconds = next(&mut bench);
    assert!(
        seconds <= 37,
        "the shorter interval counts at once: {seconds}"
    );
}

#[test]
fn o13_the_servers_get_changes_before_any_other_effect() {
    let mut bench = Bench::idle(blocks(&[A]));
    bench.subnet(2, blocks(&[A, B]));
    let effects = bench.turn();
    assert_eq!(asked(&effects), ["hold"]);
    assert!(
        matches!(&effects[0], AgentEffect::Offer { watched, is_news: true } if watched.pools_known),
        "{effects:#?}"
    );
    let offers = effects.iter();
    let offers = offers.filter(|it| matches!(it, AgentEffect::Offer { .. }));
    assert_eq!(offers.count(), 1);
    assert!(
        !bench
            .turn()
            .iter()
            .any(|it| matches!(it, AgentEffect::Offer { .. }))
    );
}

#[test]
fn o14_the_agent_is_not_ready_before_the_files_are_written_and_the_last_report_stays_meanwhile() {
    let mut bench = Bench::seen(blocks(&[A]));
    let effects = bench.run_until_files();
    let waits = !effects
        .iter()
        .any(|it| matches!(it, AgentEffect::Ready(true, _)));
    assert!(waits, "{effects:#?}");
    bench.on(AgentEvent::Files(bench.files.clone()));
    bench.run();
    assert!(bench.published().ends_with(&["ready"]));
    // No address can be assigned any more. But the last report of readiness stays until the files are written.
    bench.subnet(2, blocks(&[]));
    bench.run_until_files();
    assert!(!bench.published().contains(&"not ready"));
    bench.on(AgentEvent::Files(bench.files.clone()));
    bench.turn();
    assert_eq!(bench.published(), ["not ready"]);
}

#[test]
fn o15_nothing_is_masqueraded_before_the_network_of_the_pods_is_known() {
    let masquerading = || {
        let mut bench = Bench::seen(blocks(&[A]));
        bench.machine.masquerade = Some(Masquerade::NEW);
        bench.run_until_files();
        assert!(
            !bench.published().contains(&"masquerade"),
            "the network is unknown"
        );
        bench
    };
    let mut bench = masquerading();
    bench.on(AgentEvent::Files(bench.files.clone()));
    let effects = bench.turn();
    assert!(matches!(
        effects.last(),
        Some(AgentEffect::Masquerade { .. })
    ));
    assert!(!bench.published().contains(&"ready"));
    bench.on(AgentEvent::Masqueraded(Some("no nftables".to_owned())));
    bench.turn();
    assert_eq!(bench.published(), ["not ready"]);
    let mut bench = masquerading();
    let standing = Some(PodNetworkOwner::Left("10-kindnet.conflist".to_owned()));
    bench.files.network_owner = standing;
    bench.on(AgentEvent::Files(bench.files.clone()));
    bench.run();
    let published = bench.published();
    assert!(
        !published.contains(&"masquerade") && published.contains(&"ready"),
        "{published:?}"
    );
}

/// Reports that the status among these effects was stored. Returns the status, and whether its write was urgent.
fn stored(bench: &mut Bench, effects: Vec<AgentEffect>) -> Option<(NodeSubnetStatus, bool)> {
    let mut written = effects.into_iter().filter_map(|it| match it {
        AgentEffect::WriteStatus { status, urgent, .. } => Some((status, urgent)),
        _ => None,
    });
    let (status, urgent) = written.next()?;
    let version = (bench.now.since_boot.as_millis()).to_string();
    bench.on(AgentEvent::Written(WriteOutcome::Done {
        version,
        status: status.clone(),
        cut: None,
    }));
    Some((*status, urgent))
}

#[test]
fn the_condition_about_routes_is_written_at_once_and_ends_with_the_routes() {
    let mut bench = Bench::seen(blocks(&[A]));
    let mut after = |report: Option<RoutesReport>, pause: Duration| {
        if let Some(report) = report {
            bench.on(AgentEvent::Routes(report));
        }
        bench.pass(pause);
        let effects = bench.run();
        let (status, urgent) = stored(&mut bench, effects)?;
        let mut conditions = status.conditions.into_iter();
        let routes = conditions.find(|it| it.type_ == ROUTES_READY);
        Some((routes.map(|it| (it.status, it.message)), urgent))
    };
    let off_link = |text: &str| Some(RoutesReport::NotOnLink(text.to_owned()));
    let says = |text: &str| Some(("False".to_owned(), text.to_owned()));
    assert_eq!(after(None, 40 * SECOND), Some((None, false)));
    assert_eq!(after(Some(RoutesReport::Pending), SECOND), None);
    assert_eq!(after(off_link("a"), SECOND), Some((says("a"), true)));
    assert_eq!(after(off_link("b"), SECOND), None, "only the text differs");
    assert_eq!(after(None, 40 * SECOND), Some((says("b"), false)));
    assert_eq!(after(Some(RoutesReport::Pending), 40 * SECOND), None);
    let off = Some(RoutesReport::Off);
    assert_eq!(after(off, 40 * SECOND), Some((None, false)));
    assert_eq!(after(None, 40 * SECOND), None);
}
