//! The loop of IPAMClaims (`k8s.cni.cncf.io`): creates the IPClaim for each IPAMClaim that a pod names, and writes the
//! addresses of the IPClaim to the status of the IPAMClaim.
//!
//! IPAMClaim and IPClaim have the same name. The loop of claims does everything else, as for every IPClaim.
//!
//! # Guarantees
//! - The IPAMClaim owns the IPClaim, so the garbage collector deletes the IPClaim after its IPAMClaim. Nothing else
//!   ends the IPClaim.
//! - An IPClaim that exists is left as it is, whoever created it. So users can create it in advance, for example with
//!   certain addresses. Then its owner is not the IPAMClaim, and the status of the IPAMClaim stays as it is.
//! - The status of an IPAMClaim gets only addresses that the status of its IPClaim records. If the IPClaim gets other
//!   addresses, which happens only before a pod has used it, the status of the IPAMClaim gets these, too.
//! - If the IPClaim for a pod cannot be created, an event reports this to the pod, and no other pod is delayed.
//!
//! IPAMClaims are not watched, because only those that a pod names matter, and a cluster may lack the kind. So a new
//! leader does not know which IPAMClaims have their addresses already, and reads each of them once.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use super::failing_calls::ObjectCall;
use super::in_flight::InFlight;
use super::queue::{Load, Queue, backoff};
use super::reconcile::{KeyDecision, Loop, RequestAnswer, work_off};
use super::{Context, Purpose};
use crate::allocations::blocks::AffectedLoops;
use crate::allocations::claims::ClaimEntry;
use crate::cluster::cache::ClusterCache;
use crate::cluster::names::{ClaimName, ObjectUid, PoolName};
use crate::cluster::objects::{Claim, ClaimSource, IpamClaim, PodClaim};
use crate::cluster::request::{
    ApiRequest, ClaimOwner, ClaimOwnerKind, KnownObject, NewClaim, ObjectSpec, Rejection,
    RequestOutcome,
};
use crate::pod_claims::{PodReport, serves_claims};
use crate::pools::PoolState;
use crate::purpose::IpamClaimStep;
use cadastre_api::node_allocation::prefix_of_claimed;
use cadastre_api::{IPAMClaimIps, IPClaimSpec};
use cadastre_core::Addr;
use cadastre_core::mutation::Mutation;

/// Longest interval between two attempts to find a missing IPAMClaim, or a pool that serves its network.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// The state of the loop of IPAMClaims.
#[derive(Clone, Debug, Default)]
pub struct IpamClaimLoop {
    /// Names of IPAMClaims that pods have named, and of IPClaims that IPAMClaims own
    pub queue: Queue<ClaimName>,
    requests: InFlight<ClaimName>,
    /// IPAMClaims as they were read or written. Each is kept until its status has the addresses of its IPClaim
    read: BTreeMap<ClaimName, IpamClaim>,
    /// IPClaims whose addresses the status of their IPAMClaim has
    filled: BTreeMap<ClaimName, Filled>,
    /// Pods whose IPClaims cannot be created yet, by the name of the IPAMClaim
    waits: BTreeMap<ClaimName, Wait>,
}

/// What the status of an IPAMClaim has.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Filled {
    /// UID of the IPAMClaim
    ipam_claim: ObjectUid,
    addresses: Box<[Addr]>,
}

/// A pod that waits for an IPAMClaim or a pool.
#[derive(Clone, Debug)]
struct Wait {
    /// The last event that reported to the pod why it waits
    report: PodReport,
    /// The monotonic time at which the loop looks again for the IPAMClaim or the pool
    until: Duration,
    /// How often the loop has looked for the IPAMClaim or the pool without finding it
    looks: u32,
}

impl Loop for IpamClaimLoop {
    fn load(&self) -> Load {
        self.queue.load()
    }

    fn next(&mut self, cx: &mut Context) -> Option<(ApiRequest, Purpose)> {
        work_off(self, |it| &mut it.queue, Self::look, cx)
    }

    fn answered(&mut self, answer: &RequestAnswer, cx: &mut Context) -> AffectedLoops {
        let Purpose::IpamClaim { name, step } = answer.purpose else {
            return AffectedLoops::default();
        };
        self.requests.forget(name);
        self.queue.add(name.clone());
        match (step, answer.outcome) {
            (IpamClaimStep::Read | IpamClaimStep::Fill, RequestOutcome::IpamClaim(claim)) => {
                self.read.insert(name.clone(), claim.clone());
            }
            (
                IpamClaimStep::Read | IpamClaimStep::Fill,
                RequestOutcome::Rejected(Rejection::Missing),
            ) => self.missing(name, cx),
            // The IPAMClaim that was read may have been changed or replaced, so it is forgotten and read again. If the
            // creation took effect, the watch delivers the IPClaim.
            (IpamClaimStep::Create | IpamClaimStep::Fill, _) => {
                self.read.remove(name);
            }
            _ => {}
        }
        AffectedLoops::default()
    }
}

impl IpamClaimLoop {
    /// Queues the IPAMClaims for which a pod waits. The caller calls this when pools have changed.
    pub(crate) fn requeue(&mut self) {
        for (name, wait) in &mut self.waits {
            (wait.until, wait.looks) = (Duration::ZERO, 0);
            self.queue.add(name.clone());
        }
    }

    /// Records that there is no IPAMClaim of this name.
    fn missing(&mut self, name: &ClaimName, cx: &mut Context) {
        self.read.remove(name);
        let Some(claim) = cx.cache.claims.get(name) else {
            let what = format!(
                "IPAMClaim {name} does not exist, so the interface of the pod that names it (ipam-claim-reference) gets no address. Create it, or remove the reference"
            );
            self.wait(name, what, cx);
            return;
        };
        // An IPAMClaim that is gone needs no addresses. The garbage collector deletes its IPClaim.
        let filled = wanted(claim, cx);
        self.filled.extend(filled.map(|it| (name.clone(), it)));
    }

    fn look(&mut self, name: &ClaimName, cx: &mut Context) -> KeyDecision {
        if self.requests.is_sent(name) {
            return KeyDecision::Done;
        }
        let step = match cx.cache.claims.get(name).cloned() {
            Some(claim) => Ok(self.fill(&claim, cx)),
            None => self.create(name, cx),
        };
        let (request, step) = match step {
            Ok(Some(step)) => step,
            Ok(None) => return KeyDecision::Done,
            Err(at) => return KeyDecision::Later(at),
        };
        let call = step.call(name);
        if let Some(at) = cx.paused(&call) {
            return KeyDecision::Later(at);
        }
        self.requests.send(name.clone());
        let name = name.clone();
        KeyDecision::Send(request, Purpose::IpamClaim { name, step })
    }

    /// Returns the write of the IPClaim's addresses to the status of its IPAMClaim, or the read of the IPAMClaim before
    /// that. Returns `None` if the IPClaim has no addresses, or if the IPAMClaim has the same ones.
    fn fill(&mut self, claim: &Claim, cx: &Context) -> Option<(ApiRequest, IpamClaimStep)> {
        let name = &claim.name;
        self.waits.remove(name);
        let wanted = wanted(claim, cx).filter(|it| self.filled.get(name) != Some(it));
        let pool = claim.spec.as_ref().ok().and_then(|it| it.pool.as_ref());
        let pool = pool.and_then(|pool| cx.allocations.pools.get(pool));
        let (Some(wanted), Some(pool)) = (wanted, pool) else {
            self.read.remove(name);
            return None;
        };
        let Some(read) = self.read.get(name) else {
            let read = ApiRequest::ReadIpamClaim(name.clone());
            return Some((read, IpamClaimStep::Read));
        };
        // Another IPAMClaim of this name gets its own IPClaim, after the garbage collector has deleted this one.
        if read.uid != wanted.ipam_claim || has_addresses(read, &wanted.addresses) {
            self.read.remove(name);
            self.filled.insert(name.clone(), wanted);
            return None;
        }
        let known = KnownObject {
            name: name.clone().into(),
            uid: read.uid.clone(),
            version: read.version,
        };
        let ips = wanted.addresses.iter();
        let ips = ips.map(|addr| with_prefix(*addr, pool)).collect();
        let request = ApiRequest::FillIpamClaim(known, IPAMClaimIps { ips });
        Some((request, IpamClaimStep::Fill))
    }

    /// If a pod that is bound to a node needs the IPAMClaim, returns the read of the IPAMClaim or the creation of its
    /// IPClaim. The error is the monotonic time at which the loop looks again.
    fn create(
        &mut self,
        name: &ClaimName,
        cx: &mut Context,
    ) -> Result<Option<(ApiRequest, IpamClaimStep)>, Duration> {
        self.filled.remove(name);
        let Some(pod) = pod_of(name, cx.cache) else {
            self.read.remove(name);
            self.waits.remove(name);
            return Ok(None);
        };
        let wait = self.waits.get(name).filter(|it| it.report.pod == pod.uid);
        if let Some(until) = wait.map(|it| it.until).filter(|it| *it > cx.now.mono) {
            return Err(until);
        }
        let Some(ipam_claim) = self.read.get(name).cloned() else {
            let read = ApiRequest::ReadIpamClaim(name.clone());
            return Ok(Some((read, IpamClaimStep::Read)));
        };
        let Some(pool) = pool_of(&ipam_claim.network, cx) else {
            self.read.remove(name);
            let what = format!(
                "IPClaim {name} is not created, so an interface of the pod gets no address: no pool serves network \"{}\" of IPAMClaim {name}. Name the network in spec.networks of a pool with allocationMode Blocks and without namespaceSelector",
                ipam_claim.network
            );
            return Err(self.wait(name, what, cx));
        };
        let owner = ClaimOwner {
            kind: ClaimOwnerKind::IpamClaim,
            name: own_name(name).into(),
            uid: ipam_claim.uid,
        };
        let new = NewClaim {
            spec: IPClaimSpec {
                pool: Some(pool.to_string()),
                ..IPClaimSpec::default()
            },
            owner: Some(owner),
        };
        let spec = ObjectSpec::Claim(Box::new(new));
        let create = ApiRequest::Create(name.clone().into(), spec);
        Ok(Some((create, IpamClaimStep::Create)))
    }

    /// Records that the oldest pod of the IPAMClaim waits. Reports the reason (`what`) in an event of the pod, but not
    /// if an event reported it a short time ago. Returns the monotonic time of the next attempt.
    fn wait(&mut self, name: &ClaimName, what: String, cx: &mut Context) -> Duration {
        let now = cx.now.mono;
        let Some(pod) = pod_of(name, cx.cache) else {
            return now + LONGEST_PAUSE;
        };
        let before = self.waits.get(name).filter(|it| it.report.pod == pod.uid);
        let looks = before.map_or(0, |it| it.looks);
        let until = now + backoff(looks, LONGEST_PAUSE);
        let wait = Wait {
            report: PodReport::emit(before.map(|it| &it.report), pod, || what, cx),
            until,
            looks: looks + 1,
        };
        self.waits.insert(name.clone(), wait);
        until
    }
}

impl IpamClaimStep {
    /// Returns the call whose failures delay the step.
    pub(crate) fn call(self, name: &ClaimName) -> ObjectCall {
        let name = name.clone();
        match self {
            IpamClaimStep::Read => ObjectCall::ReadIpamClaim(name),
            IpamClaimStep::Create => ObjectCall::CreateClaim(name),
            IpamClaimStep::Fill => ObjectCall::FillIpamClaim(name),
        }
    }
}

/// Returns the oldest pod that names the IPAMClaim and is bound to a node.
pub(crate) fn pod_of<'a>(name: &ClaimName, cache: &'a ClusterCache) -> Option<&'a PodClaim> {
    let mut pods = cache.pods.of_claim(name).into_iter();
    pods.find(|pod| pod.source == ClaimSource::IpamClaim && pod.node.is_some())
}

/// Returns the pool with the highest priority among those that serve the IPAMClaims of `network`.
fn pool_of(network: &str, cx: &Context) -> Option<PoolName> {
    let all = cx.allocations.pools.iter();
    let serving =
        all.filter(|it| serves_claims(it) && it.terms.networks.iter().any(|of| of == network));
    let best = serving.min_by_key(|it| (std::cmp::Reverse(it.priority), it.name.clone()));
    best.map(|it| it.name.clone())
}

/// Returns what the status of the IPAMClaim that owns the IPClaim has to have. Returns `None` if no IPAMClaim owns it,
/// if its status does not record its addresses yet, or if it is being deleted.
fn wanted(claim: &Claim, cx: &Context) -> Option<Filled> {
    let ipam_claim = claim.ipam_claim.clone().filter(|_| !claim.deleting)?;
    // An earlier leader may have recorded addresses that another claim has.
    let is_its = cx.allocations.claims.is_stored(&claim.name);
    let mut addresses: Box<[Addr]> = claim.addresses().filter(|_| is_its).collect();
    if Mutation::IpamClaimFilledBeforeStored.is_on() {
        let entry = cx.allocations.claims.get(&claim.name);
        let cidrs = entry.into_iter().flat_map(ClaimEntry::cidrs);
        addresses = cidrs.map(|it| it.first()).collect();
    }
    (!addresses.is_empty()).then_some(Filled {
        ipam_claim,
        addresses,
    })
}

/// Returns whether the status of the IPAMClaim has exactly these addresses, with whatever prefix lengths.
fn has_addresses(ipam_claim: &IpamClaim, addresses: &[Addr]) -> bool {
    let ips = ipam_claim.ips.iter();
    let ips = ips.map(|ip| ip.split_once('/').map_or(&**ip, |(addr, _)| addr));
    ips.map(Addr::parse_lenient)
        .eq(addresses.iter().map(|addr| Some(*addr)))
}

/// Returns the address with the prefix length that the interface of the pod gets.
fn with_prefix(addr: Addr, pool: &PoolState) -> String {
    format!("{addr}/{}", prefix_of_claimed(addr, &pool.node_view))
}

fn own_name(name: &str) -> &str {
    name.split_once('/').map_or(name, |(_, name)| name)
}
