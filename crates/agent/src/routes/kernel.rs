//! Reads and changes the agent's routes in the kernel's main routing table.
//!
//! # Guarantees
//! - Only routes with the agent's [`PROTOCOL`] are replaced or deleted.
//! - A route to a node is added only if the node is on a link of this node. The kernel decides about that, because the
//!   agent names no interface.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rustix::io::Errno;

use super::table::{METRIC, PresentRoutes, REFUSE_METRIC, RouteTarget};
use crate::netlink::{dump, exchange, is_errno};
use cadastre_core::{Addr, Cidr, Family};

/// The number by which the kernel records that the agent has added a route (`ip route show proto 202`). Neither
/// iproute2 (`/etc/iproute2/rt_protos`) nor FRR, BIRD, Calico or Cilium use this number.
pub(super) const PROTOCOL: u8 = 202;

/// The routes of one family in the kernel's main table.
#[derive(Debug, Default)]
pub(super) struct FoundRoutes {
    /// The routes with the agent's [`PROTOCOL`]
    pub ours: PresentRoutes,
    /// Routes of other programs that have one of the agent's metrics, by range and metric, with their protocol number
    pub others: BTreeMap<(Cidr, u32), u8>,
}

/// Why a route could not be added.
#[derive(Debug)]
pub(super) enum RouteError {
    /// The address of the node is not on a link of this node
    NotOnLink,
    /// Another program has added a route with the same range and metric
    Taken,
    Other(io::Error),
}

/// Reads the agent's routes of a family, and the routes of other programs that have the same metrics.
pub(super) fn read(family: Family) -> io::Result<FoundRoutes> {
    let mut question = RouteMessage::default();
    question.header.address_family = family_of(family);
    let mut found = FoundRoutes::default();
    for answer in dump(&RouteNetlinkMessage::GetRoute(question))? {
        if let RouteNetlinkMessage::NewRoute(route) = answer
            && route.header.address_family == family_of(family)
        {
            found.record(&route, family);
        }
    }
    Ok(found)
}

/// Adds a route. Fails with [`RouteError::Taken`] if there is a route with the same range and metric.
pub(super) fn add(cidr: Cidr, target: RouteTarget) -> Result<(), RouteError> {
    put(cidr, target, NLM_F_CREATE | NLM_F_EXCL)
}

/// Replaces the agent's route of the same range and metric. The caller must know that the route is the agent's.
pub(super) fn replace(cidr: Cidr, target: RouteTarget) -> Result<(), RouteError> {
    put(cidr, target, NLM_F_CREATE | NLM_F_REPLACE)
}

/// Deletes the agent's route of this range and metric. Routes with another protocol stay.
pub(super) fn delete(cidr: Cidr, metric: u32) -> io::Result<()> {
    let mut route = message(cidr, metric);
    // With the scope `nowhere`, the kernel deletes a route of any scope.
    route.header.scope = RouteScope::NoWhere;
    match exchange(RouteNetlinkMessage::DelRoute(route), 0) {
        Err(error) if is_errno(&error, Errno::SRCH) => Ok(()),
        done => done.map(drop),
    }
}

fn put(cidr: Cidr, target: RouteTarget, flags: u16) -> Result<(), RouteError> {
    let mut route = message(cidr, target.metric());
    route.header.kind = match target {
        RouteTarget::Via(via) => {
            let via = RouteAddress::from(IpAddr::from(via));
            route.attributes.push(RouteAttribute::Gateway(via));
            RouteType::Unicast
        }
        RouteTarget::Unreachable => RouteType::Unreachable,
    };
    let done = exchange(RouteNetlinkMessage::NewRoute(route), flags);
    done.map(drop).map_err(|error| {
        // If the gateway is one of the node's own addresses, or is itself reached through a gateway, the error is
        // `INVAL` or `HOSTUNREACH`.
        let off_link = [
            Errno::NETUNREACH,
            Errno::HOSTUNREACH,
            Errno::INVAL,
            Errno::NETDOWN,
        ];
        let is_via = matches!(target, RouteTarget::Via(_));
        if is_via && off_link.iter().any(|it| is_errno(&error, *it)) {
            return RouteError::NotOnLink;
        }
        if is_errno(&error, Errno::EXIST) {
            return RouteError::Taken;
        }
        RouteError::Other(error)
    })
}

/// Returns a message about the agent's route of this range and metric.
fn message(cidr: Cidr, metric: u32) -> RouteMessage {
    let mut route = RouteMessage::default();
    route.header.address_family = family_of(cidr.family());
    route.header.destination_prefix_length = cidr.len();
    route.header.table = RouteHeader::RT_TABLE_MAIN;
    route.header.protocol = RouteProtocol::Other(PROTOCOL);
    let first = RouteAddress::from(IpAddr::from(cidr.first()));
    route.attributes = vec![
        RouteAttribute::Destination(first),
        RouteAttribute::Priority(metric),
    ];
    route
}

fn family_of(family: Family) -> AddressFamily {
    match family {
        Family::V4 => AddressFamily::Inet,
        Family::V6 => AddressFamily::Inet6,
    }
}

fn addr_of(address: &RouteAddress) -> Option<Addr> {
    match address {
        RouteAddress::Inet(v4) => Some(IpAddr::from(*v4).into()),
        RouteAddress::Inet6(v6) => Some(IpAddr::from(*v6).into()),
        _ => None,
    }
}

impl FoundRoutes {
    fn record(&mut self, route: &RouteMessage, family: Family) {
        let RouteHeader { table, kind, .. } = route.header;
        let (mut table, mut metric) = (u32::from(table), 0);
        let (mut first, mut via, mut is_plain) = (Addr { family, value: 0 }, None, true);
        for attribute in &route.attributes {
            match attribute {
                RouteAttribute::Table(it) => table = *it,
                RouteAttribute::Priority(it) => metric = *it,
                RouteAttribute::Destination(it) => match addr_of(it) {
                    Some(it) => first = it,
                    None => return,
                },
                RouteAttribute::Gateway(it) => via = addr_of(it),
                RouteAttribute::MultiPath(_) | RouteAttribute::Via(_) => is_plain = false,
                _ => {}
            }
        }
        // The agent adds no routes that are limited to a source or a type of service.
        let is_general = route.header.source_prefix_length == 0 && route.header.tos == 0;
        let Some(cidr) = Cidr::new(first, route.header.destination_prefix_length) else {
            return;
        };
        if table != u32::from(RouteHeader::RT_TABLE_MAIN) || !is_general {
            return;
        }
        let protocol = u8::from(route.header.protocol);
        if protocol != PROTOCOL {
            if metric == METRIC || metric == REFUSE_METRIC {
                self.others.insert((cidr, metric), protocol);
            }
            return;
        }
        let target = match (kind, via) {
            (RouteType::Unicast, Some(via)) if is_plain => Some(RouteTarget::Via(via)),
            (RouteType::Unreachable, _) => Some(RouteTarget::Unreachable),
            _ => None,
        };
        let target = target.filter(|it| it.metric() == metric);
        self.ours.insert((cidr, metric), target);
    }
}
