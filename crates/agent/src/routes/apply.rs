//! Makes the kernel's routes those that are wanted.
//!
//! # Guarantees
//! - A route that cannot be added does not keep other routes from being added.
//! - If a node is not on this node's link, the agent has no route to its pods, and deletes an outdated route to them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use rustix::io::Errno;
use tracing::warn;

use super::kernel::{self, FoundRoutes, RouteError};
use super::report::{RoutesReport, not_on_link};
use super::table::{RouteChange, RouteTarget, WantedRoutes, changes};
use crate::netlink::is_errno;
use cadastre_core::{Cidr, Family};

/// The maximum number of errors in a message.
const MOST_ERRORS: usize = 3;

/// The result of [`apply`]: how many of the wanted routes the kernel has, and why the others are missing.
#[derive(Debug, Default)]
pub(super) struct AppliedRoutes {
    /// The number of wanted routes that the kernel has
    pub installed: usize,
    /// The number of wanted routes that the kernel does not have
    pub missing: usize,
    /// The names of nodes that are not on this node's link, or have no address of a family of their pods
    pub off_link: BTreeSet<String>,
    /// Other errors, at most [`MOST_ERRORS`]
    pub errors: Vec<String>,
}

impl AppliedRoutes {
    /// Returns the report for the condition `RoutesReady`.
    pub(super) fn report(&self) -> RoutesReport {
        let off_link = (!self.off_link.is_empty()).then(|| not_on_link(self.off_link.iter()));
        match (self.errors.is_empty(), off_link) {
            (true, None) => RoutesReport::Installed,
            (true, Some(text)) => RoutesReport::NotOnLink(text),
            (false, off_link) => {
                let all = self.errors.iter().cloned().chain(off_link);
                let all: Vec<String> = all.collect();
                RoutesReport::Failed(format!("--routes=direct: {}", all.join("; ")))
            }
        }
    }

    fn error(&mut self, text: String) {
        if self.errors.len() < MOST_ERRORS {
            self.errors.push(text);
        }
    }
}

/// Reads the kernel's routes, and changes them to the wanted ones.
pub(super) fn apply(wanted: &WantedRoutes) -> AppliedRoutes {
    let mut applied = AppliedRoutes {
        off_link: wanted.without_address.clone(),
        ..AppliedRoutes::default()
    };
    for family in Family::ALL {
        let of_family = wanted.routes.iter();
        let of_family = of_family.filter(|(cidr, _)| cidr.family() == family);
        let routes: BTreeMap<Cidr, RouteTarget> = of_family.map(|(it, to)| (*it, *to)).collect();
        match kernel::read(family) {
            Ok(found) => Pass::new(wanted, &found, &mut applied).run(&routes),
            // A kernel without IPv6 answers with an error, and has no routes to delete.
            Err(_) if routes.is_empty() => {}
            Err(error) => {
                applied.missing += routes.len();
                applied.error(format!("cannot read the {family} routes: {error}"));
            }
        }
    }
    applied.installed = wanted.routes.len().saturating_sub(applied.missing);
    applied
}

/// Deletes all routes of the agent. Returns how many there were.
pub(super) fn remove_all() -> io::Result<usize> {
    let mut count = 0;
    for family in Family::ALL {
        // A kernel without IPv6 answers with an error.
        let Ok(found) = kernel::read(family) else {
            continue;
        };
        for (cidr, metric) in found.ours.into_keys() {
            kernel::delete(cidr, metric)?;
            count += 1;
        }
    }
    Ok(count)
}

/// One pass over the kernel's routes of a family, which changes them to the wanted ones.
struct Pass<'a> {
    wanted: &'a WantedRoutes,
    found: &'a FoundRoutes,
    applied: &'a mut AppliedRoutes,
}

impl<'a> Pass<'a> {
    fn new(
        wanted: &'a WantedRoutes,
        found: &'a FoundRoutes,
        applied: &'a mut AppliedRoutes,
    ) -> Self {
        Self {
            wanted,
            found,
            applied,
        }
    }

    fn run(mut self, routes: &BTreeMap<Cidr, RouteTarget>) {
        let mut all = changes(routes, &self.found.ours);
        let is_delete = |it: &RouteChange| matches!(it, RouteChange::Delete(..));
        let deletes = all.split_off(all.partition_point(|it| !is_delete(it)));
        let (count, mut failed) = (all.len(), Vec::new());
        for change in all {
            if let Err(error) = self.put(change) {
                let is_denied = is_denied(&error);
                failed.push((change, error));
                if is_denied {
                    // The kernel denies every change, so the rest is not tried.
                    return self.denied(count);
                }
            }
        }
        let is_any_deleted = !deletes.is_empty();
        for change in deletes {
            if let RouteChange::Delete(cidr, metric) = change {
                self.delete(cidr, metric);
            }
        }
        for (change, mut error) in failed {
            // A deleted route may have covered the node's address, so that the kernel did not find the node on a link.
            if is_any_deleted {
                match self.put(change) {
                    Ok(()) => continue,
                    Err(again) => error = again,
                }
            }
            self.failed(change, error);
        }
    }

    fn put(&self, change: RouteChange) -> Result<(), RouteError> {
        match change {
            RouteChange::Add(cidr, target) | RouteChange::Replace(cidr, target)
                if self.found.others.contains_key(&(cidr, target.metric())) =>
            {
                Err(RouteError::Taken)
            }
            RouteChange::Add(cidr, target) => kernel::add(cidr, target),
            RouteChange::Replace(cidr, target) => kernel::replace(cidr, target),
            RouteChange::Delete(..) => Ok(()),
        }
    }

    fn delete(&mut self, cidr: Cidr, metric: u32) {
        if let Err(error) = kernel::delete(cidr, metric) {
            let advice = advice(&error);
            let text = format!("cannot delete the route to {cidr}: {error}{advice}");
            self.applied.error(text);
        }
    }

    fn failed(&mut self, change: RouteChange, error: RouteError) {
        let (cidr, target) = match change {
            RouteChange::Add(cidr, target) | RouteChange::Replace(cidr, target) => (cidr, target),
            RouteChange::Delete(..) => return,
        };
        self.applied.missing += 1;
        let metric = target.metric();
        match (error, target) {
            (RouteError::NotOnLink, RouteTarget::Via(via)) => {
                let name = self.wanted.nodes.get(&via).cloned();
                let name = name.unwrap_or_else(|| via.to_string());
                self.applied.off_link.insert(name);
                if matches!(change, RouteChange::Replace(..)) {
                    self.delete(cidr, metric);
                }
            }
            (RouteError::NotOnLink, RouteTarget::Unreachable) => {}
            (RouteError::Taken, _) => {
                let by = self.found.others.get(&(cidr, metric));
                let by = by.map_or_else(String::new, |it| format!(" (protocol {it})"));
                self.applied.error(format!(
                    "another program has added a route to {cidr} with metric {metric}{by}: remove it (ip route del {cidr} metric {metric})"
                ));
            }
            (RouteError::Other(error), _) => {
                let advice = advice(&error);
                let text = format!("cannot add the route to {cidr}: {error}{advice}");
                self.applied.error(text);
            }
        }
    }

    fn denied(&mut self, missing: usize) {
        self.applied.missing += missing;
        let error = io::Error::from(Errno::PERM);
        let text = format!(
            "cannot change the kernel's routes: {error}{}",
            advice(&error)
        );
        if !self.applied.errors.contains(&text) {
            self.applied.error(text);
        }
    }
}

fn is_denied(error: &RouteError) -> bool {
    matches!(error, RouteError::Other(error) if is_errno(error, Errno::PERM))
}

fn advice(error: &io::Error) -> &'static str {
    if is_errno(error, Errno::PERM) {
        ": give the agent the capability NET_ADMIN"
    } else {
        ""
    }
}

/// Logs that routes of an earlier run could not be removed.
pub(super) fn log_left(error: &io::Error) {
    let advice = advice(error);
    warn!(
        "--routes=none: the routes of an earlier --routes=direct cannot be removed: {error}{advice}; or remove them by hand: ip route flush proto {0}; ip -6 route flush proto {0}",
        kernel::PROTOCOL
    );
}
