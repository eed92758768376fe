//! Two controllers, one of which leads. Whatever happens to the leader, two live nodes never have overlapping podCIDRs,
//! and every node gets podCIDRs.
//!
//! The controllers are real processes with a real API server. A recording has every revision of the nodes, and is
//! checked.

#![allow(clippy::expect_used, clippy::print_stdout, clippy::unwrap_used)] // allowed in helpers as in tests

mod common;

use std::ops::Range;
use std::time::{Duration, Instant};

use cadastre_e2e::balancer::{Balancer, Incident};
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::wire::Wire;
use cadastre_e2e::{Daemon, lease, metrics, nodes, wait};
use common::{Lab, leads, log_says, wait_leads, wait_ready};
use rustix::process::Signal;

/// The number of nodes. It is so high that the leader is still allocating podCIDRs when the fault happens.
const NODES: u32 = 1000;
/// The fault happens when this many nodes have podCIDRs.
const STRIKE_AT: u32 = 200;
/// This many nodes are created only after the fault. So the next leader has nodes to serve, however late the fault
/// happens.
const LATE: u32 = 200;
const LIMIT: Duration = Duration::from_secs(180);

const V4: &str = "10.64.0.0/13";
const V6: &str = "fd00:64::/48";

/// Starts two controllers, of which `a` leads. Returns while `a` is allocating podCIDRs to many nodes. The last nodes
/// do not exist yet.
async fn allocating() -> (Lab, Daemon, Daemon) {
    let lab = Lab::start().await;
    let (a, b) = lab.pair().await;
    create(&lab, LATE..NODES).await;
    lab.pool("default", V4, V6, 60).await;
    wait_assigned(&lab, STRIKE_AT).await;
    (lab, a, b)
}

/// Creates a pool and nodes, and calls `strike` once the first nodes have podCIDRs. Then creates the last nodes.
/// Returns how many nodes had podCIDRs after the strike.
async fn strike_amid_arrivals(lab: &Lab, strike: impl FnOnce()) -> usize {
    lab.pool("default", V4, V6, 60).await;
    let strike = async {
        wait_assigned(lab, STRIKE_AT).await;
        strike();
        lab.history.assigned()
    };
    let ((), assigned) = tokio::join!(create(lab, LATE..NODES), strike);
    create(lab, 0..LATE).await;
    assigned
}

/// Creates nodes with descending numbers, so that the order of creation differs from the order of names. A leader
/// allocates in the first order, and the next leader in the second.
async fn create(lab: &Lab, numbers: Range<u32>) {
    let (last, count) = (numbers.end - 1, numbers.end - numbers.start);
    let created = nodes::create(&lab.cluster, count, |i| nodes::numbered(last - i)).await;
    created.unwrap();
}

async fn wait_assigned(lab: &Lab, nodes: u32) {
    let assigned = lab.history.wait_until_all_assigned(nodes as usize, LIMIT);
    assigned.await.unwrap();
}

/// Asserts that no leader touched a node. No touch is needed, because the Lease names the writes that an earlier leader
/// may still send.
fn assert_untouched(lab: &Lab) {
    let touched = lab.history.revisions().iter().any(|it| it.term.is_some());
    assert!(!touched, "a node was touched");
}

#[tokio::test(flavor = "multi_thread")]
async fn invariant_1_a_leader_killed_in_mid_assignment_leaves_no_duplicate_and_no_node_behind() {
    let _turn = common::turn().await;
    let lab = Lab::start().await;
    let (mut a, b) = lab.pair().await;
    let left = strike_amid_arrivals(&lab, || _ = a.process().kill().unwrap()).await;
    let struck = Instant::now();
    lab.all_served(NODES as usize).await;
    println!(
        "killed with {left} of {NODES} served; all served {:?} later",
        struck.elapsed()
    );
    assert!(leads(&b).await.unwrap());
    assert_untouched(&lab);
}

#[tokio::test(flavor = "multi_thread")]
async fn invariant_1_a_leader_paused_longer_than_its_lease_writes_nothing_more() {
    let _turn = common::turn().await;
    let lab = Lab::start().await;
    let (mut a, b) = lab.pair().await;
    strike_amid_arrivals(&lab, || a.process().signal(Signal::STOP).unwrap()).await;
    wait::until("b holds the Lease", LIMIT, async || {
        let holder = lease::holder(&lab.client).await?;
        Ok(holder.filter(|it| lease::identity(it) == "b"))
    })
    .await
    .unwrap();
    a.process().signal(Signal::CONT).unwrap();
    let left = lab.history.assigned();
    lab.all_served(NODES as usize).await;
    println!("went on with {left} of {NODES} served");
    assert_untouched(&lab);

    wait_ready(&a, "standby (leader: b_").await;
    assert!(log_says(&mut a, "no longer leading"));
    let figures = a.metrics().await.unwrap();
    let leading = metrics::sum(&figures, "leader_election_master_status", &[]);
    assert!(leading.abs() < f64::EPSILON);
    assert!(leads(&b).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn invariant_1_writes_that_arrive_after_the_next_leader_allocates_are_rejected() {
    let _turn = common::turn().await;
    let lab = Lab::start().await;
    let wire = Wire::to(&lab.cluster).await.unwrap();
    let kubeconfig = wire.kubeconfig(&lab.cluster, ADMIN).unwrap();
    let a = lab.controller_by(&kubeconfig, "a", &[]);
    let (mut a, b) = lab.pair_of(a).await;
    // The pool is created after the nodes. So `a` decides on hundreds of assignments at the same time, and one renewal
    // of the Lease names them all. `a` may send only assignments that its Lease names. Later renewals do not arrive,
    // because the wire holds them.
    create(&lab, 0..NODES).await;
    wire.hold_after(STRIKE_AT as usize);
    lab.pool("default", V4, V6, 60).await;
    wait::until("a has filled the wire", LIMIT, async || {
        Ok((wire.waiting() > 10).then_some(()))
    })
    .await
    .unwrap();
    a.process().kill().unwrap();
    let left = lab.history.assigned();
    // The next leader allocates in another order, so it may reach the nodes of the delayed writes early or late. The
    // delayed writes are released only when all nodes have podCIDRs. An earlier release would prove nothing, because a
    // delayed write may succeed while its node has no podCIDR: the next leader reserves the range of the write for the
    // node.
    wait_assigned(&lab, NODES).await;
    let refused = async || {
        let counts = lab.cluster.apiserver_metrics().await.unwrap();
        let labels = [("resource", "nodes"), ("verb", "PATCH"), ("code", "422")];
        metrics::sum(&counts, "apiserver_request_total", &labels)
    };
    assert!(refused().await.abs() < f64::EPSILON);
    wire.release();
    lab.all_served(NODES as usize).await;
    let refused = refused().await;
    println!("killed with {left} of {NODES} served; {refused} writes came late and were refused");
    assert!(refused > 0.0, "no write came late: nothing was proven");
    assert_untouched(&lab);
    assert!(leads(&b).await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn invariant_1_an_api_server_killed_in_mid_assignment_costs_time_and_nothing_else() {
    let _turn = common::turn().await;
    let (mut lab, mut a, mut b) = allocating().await;
    lab.cluster.kill_apiserver().unwrap();
    let left = lab.history.assigned();
    lab.cluster.start_apiserver().await.unwrap();
    create(&lab, 0..LATE).await;
    lab.all_served(NODES as usize).await;
    a.process().check_running().unwrap();
    b.process().check_running().unwrap();
    wait::until("one leads", LIMIT, async || {
        Ok((leads(&a).await? != leads(&b).await?).then_some(()))
    })
    .await
    .unwrap();
    println!(
        "killed with {left} of {NODES} served; gaps in the history: {}",
        lab.history.gaps()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clean_hand_over_in_mid_assignment_touches_no_node() {
    let _turn = common::turn().await;
    let (lab, mut a, b) = allocating().await;
    let holders = lease::Holders::watch(lab.client.clone());
    wait::until("the watch shows the holder", LIMIT, async || {
        Ok(holders.seen().pop())
    })
    .await
    .unwrap();
    let stop = async {
        let status = a.process().stop(Duration::from_secs(20)).await.unwrap();
        (status, Instant::now(), lab.history.assigned())
    };
    let lead = async {
        wait_leads(&b).await;
        Instant::now()
    };
    let late = create(&lab, 0..LATE);
    let ((status, exit, left), leading, ()) = tokio::join!(stop, lead, late);
    assert_eq!(status.code(), Some(0), "{}", a.process().log_tail(20));
    lab.all_served(NODES as usize).await;

    let seen = wait::until("the Lease was free, then b's", LIMIT, async || {
        let seen = holders.seen();
        let last = seen.last().and_then(|(_, holder)| holder.as_deref());
        Ok(last
            .is_some_and(|it| lease::identity(it) == "b")
            .then_some(seen))
    })
    .await
    .unwrap();
    let order: Vec<Option<&str>> = seen
        .iter()
        .map(|(_, holder)| holder.as_deref().map(lease::identity))
        .collect();
    assert_eq!(order, [Some("a"), None, Some("b")]);
    let free = seen[1].0;
    println!(
        "hand-over with {left} of {NODES} served: Lease free to next holder {:?}, to the next leader \
         dealing {:?}; exit to the next leader dealing {:?}",
        seen[2].0 - free,
        leading.saturating_duration_since(free),
        leading.saturating_duration_since(exit),
    );
    assert!(log_says(&mut a, "settled=true"));
    assert_untouched(&lab);
}

/// A connection that falls silent fails the next request on it. After many parallel writes, there are many connections.
#[tokio::test(flavor = "multi_thread")]
async fn connections_that_fall_silent_cost_at_most_two_renewals_of_the_lease() {
    let _turn = common::turn().await;
    let lab = Lab::start().await;
    let balancer = Balancer::start(vec![lab.cluster.address()]).unwrap();
    let kubeconfig = lab.cluster.kubeconfig_through(ADMIN, balancer.address());
    let mut a = lab.controller_by(&kubeconfig.unwrap(), "a", &[]);
    a.wait_ready(LIMIT).await.unwrap();
    wait_leads(&a).await;
    create(&lab, 0..LATE).await;
    lab.pool("default", V4, V6, 60).await;
    lab.all_served(LATE as usize).await;

    balancer.cause(Incident::Silence);
    wait::until("a renewal fails", LIMIT, async || {
        Ok((lease_errors(&a).await > 0.0).then_some(()))
    })
    .await
    .unwrap();
    let before = lease::version(&lab.client).await.unwrap();
    wait::until("the Lease is renewed", LIMIT, async || {
        let version = lease::version(&lab.client).await?;
        Ok((version != before).then_some(()))
    })
    .await
    .unwrap();
    let errors = lease_errors(&a).await;
    assert!((1.0..=2.0).contains(&errors), "{errors} requests failed");
    a.process().check_running().unwrap();
}

/// Returns how many requests about the Lease have failed.
async fn lease_errors(daemon: &Daemon) -> f64 {
    let figures = daemon.metrics().await.unwrap();
    metrics::sum(&figures, "cadastre_lease_errors_total", &[])
}

#[tokio::test(flavor = "multi_thread")]
async fn leader_and_standby_say_what_they_are() {
    let _turn = common::turn().await;
    let lab = Lab::start().await;
    let (mut a, mut b) = lab.pair().await;
    let holder = lease::holder(&lab.client).await.unwrap().unwrap();
    assert_eq!(a.ready().await.unwrap(), "leader\n");
    assert_eq!(
        b.ready().await.unwrap(),
        format!("standby (leader: {holder})\n")
    );
    for (daemon, expected) in [(&mut a, 1.0), (&mut b, 0.0)] {
        let figures = daemon.metrics().await.unwrap();
        let labels = [("name", "cadastre-controller")];
        let status: Vec<f64> = figures
            .iter()
            .filter(|it| it.name == "leader_election_master_status")
            .map(|it| it.value)
            .collect();
        let labelled = metrics::sum(&figures, "leader_election_master_status", &labels);
        assert_eq!((status.len(), status[0], labelled), (1, expected, expected));
        assert_eq!(daemon.get("/healthz").await.unwrap().trim(), "ok");
    }

    // A standby that cannot read the Lease reports that it knows of no leader.
    let mut early = lab.controller("early", &["--lease-namespace", "nowhere"]);
    wait_ready(&early, "standby (no leader").await;
    assert!(log_says(
        &mut early,
        "check the Role and that the namespace exists"
    ));
}
