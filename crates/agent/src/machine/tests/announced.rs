//! What the routing daemon announces, and when a block is reported as released.

use super::*;
use crate::announce::AnnounceError;
use crate::publish::WriteOutcome;
use cadastre_api::{NodeSubnetStatus, RANGES_ANNOUNCED};

fn announcing() -> Bench {
    let mut bench = Bench::seen(blocks(&[A, B]));
    bench.machine.announcer = Some(Announcer::NEW);
    bench
}

/// Runs until nothing happens any more. Returns the ranges that the daemon gets, and the status that is written.
fn run(bench: &mut Bench) -> (Option<Vec<String>>, Option<NodeSubnetStatus>) {
    let (mut ranges, mut written) = (None, None);
    for effect in bench.run() {
        match effect {
            AgentEffect::Announce(all) => {
                let all = all.blocks.iter().map(|it| it.cidr.to_string());
                assert_eq!(ranges.replace(all.collect()), None, "announced twice");
            }
            AgentEffect::WriteStatus { status, .. } => written = Some(*status),
            _ => {}
        }
    }
    if let Some(status) = written.clone() {
        let version = bench.now.since_boot.as_millis().to_string();
        let (status, cut) = (Box::new(status), None);
        bench.on(AgentEvent::Written(WriteOutcome::Done {
            version,
            status,
            cut,
        }));
    }
    (ranges, written)
}

fn announced(bench: &mut Bench, report: Result<(), &str>) {
    bench.on(AgentEvent::Announced(report.map_err(AnnounceError::new)));
}

#[test]
fn a_block_is_reported_as_released_once_the_daemon_has_read_that_it_is_gone() {
    let mut bench = announcing();
    let (ranges, _) = run(&mut bench);
    assert_eq!(ranges.unwrap(), [A, B]);
    // The daemon answers only after the block was released.
    bench.snapshot.blocks[1].state = BlockState::Released;
    bench.on(AgentEvent::Changed);
    bench.pass(40 * SECOND);
    let (ranges, status) = run(&mut bench);
    assert_eq!(ranges, None, "one write at a time");
    let is_released = |status: &NodeSubnetStatus| {
        let block = status.blocks.iter().find(|it| it.cidr == B).unwrap();
        assert_eq!(block.free, 0);
        block.released
    };
    assert!(!is_released(&status.unwrap()));
    announced(&mut bench, Ok(()));
    bench.pass(SECOND);
    let (ranges, status) = run(&mut bench);
    assert_eq!(
        (ranges.unwrap(), status.is_some_and(|it| is_released(&it))),
        (vec![A.to_owned()], false)
    );
    // The daemon may or may not have read the file.
    announced(&mut bench, Err("no answer"));
    bench.pass(40 * SECOND);
    let (ranges, status) = run(&mut bench);
    let status = status.unwrap();
    let mut conditions = status.conditions.iter();
    let condition = conditions.find(|it| it.type_ == RANGES_ANNOUNCED).unwrap();
    assert!(condition.status == "False" && condition.message.starts_with("no answer. "));
    assert_eq!(
        (ranges.unwrap(), is_released(&status)),
        (vec![A.to_owned()], false)
    );
    announced(&mut bench, Ok(()));
    bench.pass(SECOND);
    let (ranges, status) = run(&mut bench);
    assert_eq!(ranges, None);
    assert!(is_released(&status.unwrap()), "the release is urgent");
}

#[test]
fn nothing_is_announced_while_another_network_serves_the_pods() {
    let mut bench = announcing();
    let effects = bench.run_until_files();
    let is_early = |it: &AgentEffect| matches!(it, AgentEffect::Announce(_));
    assert!(
        !effects.iter().any(is_early),
        "an earlier file stays until the network is known"
    );
    bench.files.network_owner = Some(PodNetworkOwner::Left("10-kindnet.conflist".to_owned()));
    bench.on(AgentEvent::Files(bench.files.clone()));
    let (ranges, _) = run(&mut bench);
    assert!(ranges.unwrap().is_empty());
}

#[test]
fn the_condition_ends_when_the_agent_announces_no_longer() {
    let mut bench = announcing();
    run(&mut bench);
    announced(&mut bench, Ok(()));
    bench.pass(40 * SECOND);
    let (_, status) = run(&mut bench);
    let has = |status: &NodeSubnetStatus| {
        let mut conditions = status.conditions.iter();
        conditions.any(|it| it.type_ == RANGES_ANNOUNCED)
    };
    assert!(has(&status.unwrap()));
    bench.machine.announcer = None;
    bench.pass(40 * SECOND);
    let (_, status) = run(&mut bench);
    assert!(!has(&status.unwrap()));
}
