//! Tests of leader elections with a real API server. They check which candidate leads, since when, and what the Lease
//! contains.
//!
//! The elections run in this process. Each test uses a Lease of its own, so that tests do not affect each other.

#![allow(clippy::unwrap_used)] // allowed in helpers as in tests

use std::time::{Duration, Instant};

use cadastre_controller::cluster::leader_metrics::LeaderMetrics;
use cadastre_controller::cluster::lease::{Leadership, LeadershipTerm, LeaseSettings, Takeover};
use cadastre_controller::cluster::lease_task::Election;
use cadastre_controller::cluster::readiness::LeaderReadiness;
use cadastre_daemon::client;
use cadastre_daemon::clock::Clock;
use cadastre_daemon::telemetry::HttpMetrics;
use cadastre_e2e::control_plane::ADMIN;
use cadastre_e2e::{ControlPlane, Options};
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::{OnceCell, watch};
use tokio::task::JoinHandle;

const LIMIT: Duration = Duration::from_secs(120);

/// Returns a controller's default settings for the Lease, with this nonce.
fn usual(nonce: &str) -> LeaseSettings {
    LeaseSettings {
        identity: "test".to_owned(),
        nonce: nonce.to_owned(),
        lease_duration: Duration::from_secs(4),
        renew_deadline: Duration::from_secs(3),
        retry_period: Duration::from_secs(1),
    }
}

/// A candidate in the election for one Lease.
struct Candidate {
    leadership: watch::Receiver<Leadership>,
    release: watch::Sender<Option<bool>>,
    task: JoinHandle<Result<(), String>>,
}

impl Candidate {
    fn start(client: &Client, lease: &str, nonce: &str) -> Self {
        let (publish, leadership) = watch::channel(Leadership::Standby { leader: None });
        let (release, released) = watch::channel(None);
        let election = Election {
            client: client.clone(),
            namespace: "default".to_owned(),
            name: lease.to_owned(),
            settings: usual(nonce),
            publish,
            wanted: watch::channel(None).1,
            readiness: LeaderReadiness::default(),
            metrics: LeaderMetrics::register(&prometheus::Registry::new(), lease).unwrap(),
        };
        let task = tokio::spawn(election.run(Clock, released));
        Self {
            leadership,
            release,
            task,
        }
    }

    /// Waits until the candidate leads, and returns its term of leadership.
    async fn leads(&mut self) -> LeadershipTerm {
        let leading = |now: &Leadership| matches!(now, Leadership::Leading(_));
        let wait = self.leadership.wait_for(leading);
        let now = tokio::time::timeout(LIMIT, wait).await.unwrap().unwrap();
        let Leadership::Leading(term) = now.clone() else {
            unreachable!("waited for it")
        };
        term
    }

    /// Waits until the candidate's state has changed `times` times. The state of a leader changes with each renewal of
    /// the Lease.
    async fn renews(&mut self, times: u32) {
        for _ in 0..times {
            let renewed = tokio::time::timeout(LIMIT, self.leadership.changed()).await;
            renewed.unwrap().unwrap();
        }
    }

    /// Waits until the candidate is a standby that knows from the Lease which candidate leads.
    async fn stands_by(&mut self) {
        let known = |now: &Leadership| matches!(now, Leadership::Standby { leader: Some(_) });
        let wait = self.leadership.wait_for(known);
        tokio::time::timeout(LIMIT, wait).await.unwrap().unwrap();
    }
}

/// Returns the control plane that all tests share. Also returns a new client, because a client ends with the tokio
/// runtime of its test.
async fn start() -> (&'static ControlPlane, Client) {
    static CLUSTER: OnceCell<ControlPlane> = OnceCell::const_new();
    let start = async || ControlPlane::start(Options::default()).await.unwrap();
    let cluster = CLUSTER.get_or_init(start).await;
    (cluster, cluster.client().await.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_hands_over_before_the_lease_ends_and_says_whether_all_was_settled() {
    let (_cluster, client) = start().await;
    for (name, settled, takeover) in [
        ("settled", true, Takeover::Clean),
        ("unsettled", false, Takeover::Unclean),
    ] {
        let mut a = Candidate::start(&client, name, "a");
        assert_eq!(a.leads().await.takeover, Takeover::First);
        let mut b = Candidate::start(&client, name, "b");
        b.stands_by().await;
        let released = Instant::now();
        a.release.send_replace(Some(settled));
        let term = b.leads().await;
        let took = released.elapsed();
        println!("{name}: handed over in {took:?}");
        assert!(took < usual("b").lease_duration, "{took:?}");
        assert_eq!((term.takeover, &*term.id), (takeover, "2-b"));
        let ended = tokio::time::timeout(LIMIT, a.task).await.unwrap();
        assert_eq!(ended.unwrap(), Ok(()));
        assert_eq!(*a.leadership.borrow(), Leadership::Released);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_is_gone_is_followed_after_its_lease_and_fenced_off() {
    let (_cluster, client) = start().await;
    let mut a = Candidate::start(&client, "gone", "a");
    a.leads().await;
    let mut b = Candidate::start(&client, "gone", "b");
    b.stands_by().await;
    a.task.abort();
    assert!(a.task.await.unwrap_err().is_cancelled());
    let Leadership::Leading(last) = a.leadership.borrow().clone() else {
        panic!("a led when it was killed")
    };
    let term = b.leads().await;
    assert!(Clock.now() > last.valid_until, "b led while a could write");
    assert_eq!(term.takeover, Takeover::Unclean);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_deleted_under_its_holder_is_waited_out_by_all() {
    let (_cluster, client) = start().await;
    let leases = Api::<Lease>::namespaced(client.clone(), "default");
    let mut a = Candidate::start(&client, "deleted", "a");
    a.leads().await;
    let mut b = Candidate::start(&client, "deleted", "b");
    b.stands_by().await;
    let how = DeleteParams::default();
    leases.delete("deleted", &how).await.unwrap();
    let deleted = Instant::now();
    let ended = |now: &Leadership| matches!(now, Leadership::Standby { .. });
    let end = tokio::time::timeout(LIMIT, a.leadership.wait_for(ended));
    drop(end.await.unwrap().unwrap());
    let term = tokio::select! {
        term = a.leads() => term,
        term = b.leads() => term,
    };
    assert!(
        deleted.elapsed() >= 4 * usual("a").lease_duration,
        "{:?}",
        deleted.elapsed()
    );
    assert_eq!(term.takeover, Takeover::Unclean);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_keeps_what_others_wrote_and_the_time_of_acquisition() {
    let (_cluster, client) = start().await;
    let leases = Api::<Lease>::namespaced(client.clone(), "default");
    let mut a = Candidate::start(&client, "kept", "a");
    let term = a.leads().await;
    let note = json!({"metadata": {"labels": {"team": "net"}, "annotations": {"note": "ours"}}});
    let patch = Patch::Merge(note);
    let noted = leases
        .patch("kept", &PatchParams::default(), &patch)
        .await
        .unwrap();
    let before = noted.spec.unwrap();
    // If the API server is slow, the first answers are those to renewals from before the edit.
    let (metadata, after) = loop {
        a.renews(1).await;
        let lease = leases.get("kept").await.unwrap();
        let spec = lease.spec.unwrap();
        if spec.renew_time > before.renew_time {
            break (lease.metadata, spec);
        }
    };
    assert!(
        matches!(&*a.leadership.borrow(), Leadership::Leading(now) if now.id == term.id),
        "an edit does not end the term of leadership"
    );
    assert_eq!(metadata.labels, noted.metadata.labels);
    assert_eq!(metadata.annotations, noted.metadata.annotations);
    assert_eq!(after.acquire_time, before.acquire_time);
}

/// A standby may send at most this many requests per minute, including its watch. With polling, it would send some 130.
const CALM: f64 = 10.0;

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_goes_by_its_watch_and_seldom_asks() {
    let (cluster, client) = start().await;
    let registry = prometheus::Registry::new();
    let reach = client::Options {
        kubeconfig: Some(cluster.kubeconfig(ADMIN).unwrap()),
        ..client::Options::default()
    };
    let counted = HttpMetrics::register(&registry).unwrap();
    let counted = client::connect(&reach, counted).await.unwrap();
    let mut a = Candidate::start(&client, "calm", "a");
    a.leads().await;
    let mut b = Candidate::start(&counted, "calm", "b");
    b.stands_by().await;
    // A standby polls until its watch has delivered an event, so the first two renewals are not counted.
    a.renews(2).await;
    let (before, begun) = (requests(&registry), Instant::now());
    a.renews(24).await;
    let asked = requests(&registry) - before;
    let a_minute = asked * 60.0 / begun.elapsed().as_secs_f64();
    println!(
        "{asked} requests in {:?}: {a_minute:.0} a minute",
        begun.elapsed()
    );
    assert!(a_minute <= CALM, "{a_minute:.0} requests a minute");
}

/// Returns the number of requests that a client has counted in this registry.
fn requests(registry: &prometheus::Registry) -> f64 {
    let all = registry.gather();
    let all = all
        .iter()
        .filter(|it| it.name() == "rest_client_requests_total");
    let all = all.flat_map(prometheus::proto::MetricFamily::get_metric);
    all.map(|it| it.get_counter().get_value()).sum()
}
