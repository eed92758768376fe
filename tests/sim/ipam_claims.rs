//! IPAMClaims, which KubeVirt creates for the interfaces of virtual machines.
//!
//! The pods of the last of the virtual machines that migrate name an IPAMClaim for their only interface, instead of an
//! IPClaim. KubeVirt creates the IPAMClaim before the first pod or a while after it, and deletes the IPAMClaim at any
//! moment. The garbage collector deletes an IPClaim whose IPAMClaim is gone.

use std::collections::BTreeMap;

use cadastre_controller::cluster::names::{ClaimName, ObjectUid};
use cadastre_controller::cluster::objects::{Claim, IpamClaim, Pod, PodClaim};
use cadastre_controller::cluster::request::{KnownObject, Rejection, RequestOutcome};

use super::api::Api;
use super::checks::{Verdict, wrong};
use super::clock::SECOND;
use super::run::{Due, Sim};

/// The name of the network that all pools of blocks serve.
pub const NETWORK: &str = "vms";
/// The name of the interface for which pods name IPAMClaims.
pub const INTERFACE: &str = "net1";

/// An IPAMClaim in the API.
#[derive(Clone, Debug)]
pub struct LiveIpamClaim {
    pub uid: ObjectUid,
    version: u64,
    /// The addresses in the status, with prefix lengths.
    ips: Vec<String>,
}

/// All IPAMClaims, and a wrong write of a controller to one of them, if there was any.
#[derive(Clone, Default)]
pub struct IpamClaims {
    pub live: BTreeMap<ClaimName, LiveIpamClaim>,
    wrong: Option<(ClaimName, String)>,
}

/// Returns the claim that a pod uses, for itself or for its interface.
pub fn used_claim(pod: &Pod) -> Option<&PodClaim> {
    pod.claim.as_deref().or(pod.interface_claims.first())
}

impl Api {
    pub fn read_ipam_claim(&self, name: &ClaimName) -> Result<RequestOutcome, Rejection> {
        let found = self.ipam_claims.live.get(name).ok_or(Rejection::Missing)?;
        Ok(RequestOutcome::IpamClaim(IpamClaim {
            uid: found.uid.clone(),
            version: found.version,
            network: NETWORK.to_owned(),
            ips: found.ips.clone(),
        }))
    }

    /// Writes the addresses to the status. Notes an error if no status of the IPClaim ever recorded exactly these
    /// addresses.
    pub fn fill_ipam_claim(
        &mut self,
        as_read: &KnownObject,
        ips: &[String],
    ) -> Result<RequestOutcome, Rejection> {
        let name = ClaimName::from(&*as_read.name);
        let all = &mut self.ipam_claims;
        let found = all.live.get_mut(&name).ok_or(Rejection::Missing)?;
        if (&found.uid, found.version) != (&as_read.uid, as_read.version) {
            return Err(Rejection::Guard("another UID or version".to_owned()));
        }
        let is_its = |it: &Claim| it.name == name && it.ipam_claim.as_ref() == Some(&as_read.uid);
        let was_recorded = |it: &Claim| is_its(it) && has_addresses(ips, it);
        if !self.claims.versions().any(was_recorded) {
            let text = format!("{name} is filled with {ips:?}, which its IPClaim never had");
            all.wrong = Some((name.clone(), text));
        }
        if !self.drops_changes {
            found.ips = ips.to_vec();
            found.version += 1;
        }
        self.read_ipam_claim(&name)
    }
}

/// Returns whether the status of the claim records these addresses, which have prefix lengths.
fn has_addresses(ips: &[String], claim: &Claim) -> bool {
    let own = claim.addresses().map(|it| it.to_string());
    own.eq(ips.iter().map(|it| bare(it)))
}

fn bare(ip: &str) -> &str {
    ip.split_once('/').map_or(ip, |(address, _)| address)
}

impl Sim {
    /// Makes KubeVirt create the IPAMClaim that a new pod names, at once or later.
    pub fn want_ipam_claim(&mut self, name: &ClaimName) {
        if self.rng.chance(7_000) {
            self.put_ipam_claim(name);
        } else {
            let lag = self.rng.stretch(SECOND / 10, 20 * SECOND);
            self.after(lag, Due::IpamClaim(name.clone()));
        }
    }

    pub fn put_ipam_claim(&mut self, name: &ClaimName) {
        if self.api.ipam_claims.live.contains_key(name) {
            return;
        }
        let uid = self.api.uid();
        self.log(Some(name), || format!("IPAMClaim {uid} is created"));
        let claim = LiveIpamClaim {
            uid,
            version: 1,
            ips: Vec::new(),
        };
        self.api.ipam_claims.live.insert(name.clone(), claim);
    }

    /// Makes KubeVirt delete IPAMClaims that no pod names. Also makes the garbage collector delete the IPClaims of
    /// IPAMClaims that are gone.
    pub fn drop_ipam_claims(&mut self) {
        let live: Vec<ClaimName> = self.api.ipam_claims.live.keys().cloned().collect();
        for name in live {
            let pods = self.api.pods.live.values().filter(|pod| !pod.finished);
            let mut used = pods.filter_map(|pod| used_claim(pod));
            if !used.any(|it| it.claim == name) && self.rng.chance(3_000) {
                self.log(Some(&name), || "IPAMClaim is deleted".to_owned());
                self.api.ipam_claims.live.remove(&name);
            }
        }
        let live = &self.api.ipam_claims.live;
        let is_gone = |claim: &&Claim| {
            let owner = claim.ipam_claim.as_ref();
            let is = live.get(&claim.name).map(|it| &it.uid);
            !claim.deleting && owner.is_some() && owner != is
        };
        let claims = self.api.claims.live.values().map(AsRef::as_ref);
        let gone: Vec<ClaimName> = claims.filter(is_gone).map(|it| it.name.clone()).collect();
        for name in gone {
            self.api.delete::<Claim>(&name);
        }
    }

    /// Checks that no IPAMClaim got addresses that its IPClaim does not have.
    pub fn check_filled(&mut self) -> Verdict {
        match self.api.ipam_claims.wrong.take() {
            Some((name, text)) if !self.was_restored() => wrong("claim", text, [&*name]),
            _ => Ok(()),
        }
    }

    /// Checks at the end that each IPAMClaim has the addresses of its IPClaim.
    pub fn check_ipam_claims_end(&self) -> Verdict {
        for claim in self.api.claims.live.values() {
            let Some(uid) = &claim.ipam_claim else {
                continue;
            };
            let of = self.api.ipam_claims.live.get(&claim.name);
            let Some(of) = of.filter(|it| it.uid == *uid && !claim.deleting) else {
                continue;
            };
            // A user may have deleted the IPClaim. Then the IPAMClaim keeps the addresses of before until the next
            // IPClaim has addresses.
            let has_some = claim.addresses().next().is_some();
            if has_some && !has_addresses(&of.ips, claim) {
                let own: Vec<String> = claim.addresses().map(|it| it.to_string()).collect();
                let text = format!("{} has {own:?}, and its IPAMClaim {:?}", claim.name, of.ips);
                return wrong("claim", text, [&*claim.name]);
            }
        }
        Ok(())
    }
}
