//! Translates between the messages of the gRPC API and the types of the node's store.

use std::collections::BTreeSet;

use tonic::metadata::MetadataValue;
use tonic::{Code, Status};

use super::v1;
use crate::leaks::{LeakReason, Reasons};
use crate::service::label;
use crate::snapshot::{addresses, pool_cidrs};
use cadastre_core::node_allocation::NodeAllocation;
use cadastre_core::{Addr, Cidr};
use cadastre_node::{AddressAssignment, Attachment, BlockState, OpError, OpErrorKind, Snapshot};

pub(super) fn refused(refusal: OpError) -> Status {
    let code = match refusal.why {
        OpErrorKind::Exhausted => Code::ResourceExhausted,
        OpErrorKind::NoBlock | OpErrorKind::Mismatch => Code::FailedPrecondition,
        OpErrorKind::UnknownPool => Code::NotFound,
        OpErrorKind::NotInBlocks => Code::OutOfRange,
        OpErrorKind::NotFree => Code::AlreadyExists,
        OpErrorKind::NotUsable => Code::InvalidArgument,
        OpErrorKind::Busy | OpErrorKind::PodUnknown | OpErrorKind::Unprobed => Code::Unavailable,
        OpErrorKind::Store => Code::Internal,
    };
    let mut status = Status::new(code, refusal.text);
    let why = MetadataValue::from_static(label(refusal.why));
    status.metadata_mut().insert("cadastre-why", why);
    status
}

pub(super) fn attachment(given: Option<v1::Attachment>) -> Result<Attachment, Status> {
    let given = given.unwrap_or_default();
    for (name, text) in [
        ("network", &given.network),
        ("container_id", &given.container_id),
        ("ifname", &given.ifname),
    ] {
        if text.is_empty() || text.len() > 1024 {
            return Err(Status::invalid_argument(format!(
                "attachment.{name} has to be a text of 1 to 1024 bytes"
            )));
        }
    }
    Ok(Attachment {
        network: given.network,
        container_id: given.container_id,
        ifname: given.ifname,
    })
}

pub(super) fn read_addresses(texts: &[String]) -> Result<Vec<Addr>, Status> {
    let read = |text: &String| {
        Addr::parse_strict(text).ok_or_else(|| {
            Status::invalid_argument(format!("\"{text}\" is no address in canonical form"))
        })
    };
    texts.iter().map(read).collect()
}

fn text<T: ToString>(it: Option<T>) -> String {
    it.map_or_else(String::new, |it| it.to_string())
}

pub(super) fn write_assignment(given: AddressAssignment) -> v1::AddResponse {
    let addresses = given.addresses.into_iter().map(|it| v1::Address {
        address: it.address.to_string(),
        prefix_length: it.prefix.into(),
        gateway: text(it.gateway),
        pool: it.pool,
        block: it.block.to_string(),
    });
    let routes = given.routes.into_iter().map(|it| v1::Route {
        destination: it.dst.to_string(),
        gateway: text(it.gw),
    });
    v1::AddResponse {
        addresses: addresses.collect(),
        routes: routes.collect(),
        dns: Some(v1::Dns {
            nameservers: given.dns.nameservers,
            domain: given.dns.domain,
            search: given.dns.search,
            options: given.dns.options,
        }),
    }
}

pub(super) fn write_list(snapshot: Snapshot, leaks: &Reasons) -> v1::ListResponse {
    let allocations = snapshot.attachments.into_iter().map(|it| {
        let leak = leaks.get(&it.attachment).copied();
        let texts = addresses(&it).map(|addr| addr.to_string()).collect();
        v1::Allocation {
            addresses: texts,
            attachment: Some(v1::Attachment {
                network: it.attachment.network,
                container_id: it.attachment.container_id,
                ifname: it.attachment.ifname,
            }),
            pod: it.pod.map(|pod| v1::Pod {
                namespace: pod.namespace,
                name: pod.name,
                uid: pod.uid,
            }),
            netns: it.netns,
            since_ms: it.since_ms,
            leak: leak.map_or("", LeakReason::as_str).to_owned(),
        }
    });
    let blocks = snapshot.blocks.into_iter().map(|it| v1::Block {
        cidr: it.cidr.to_string(),
        uid: it.uid,
        pool: it.pool,
        used: it.counts.used,
        cooling: it.counts.cooling,
        free: it.counts.free,
        draining: it.state == BlockState::Draining,
        unlisted: it.state == BlockState::Unlisted,
    });
    v1::ListResponse {
        allocations: allocations.collect(),
        blocks: blocks.collect(),
    }
}

pub(super) fn write_holding(holding: &NodeAllocation) -> v1::WatchResponse {
    let assigning = holding.blocks.iter().filter(|it| !it.draining);
    let ranges: BTreeSet<Cidr> = assigning.map(|it| it.cidr).collect();
    let of_pools: BTreeSet<Cidr> = pool_cidrs(holding).collect();
    v1::WatchResponse {
        node_uid: holding.node_uid.clone(),
        ranges: ranges.iter().map(ToString::to_string).collect(),
        pool_cidrs: of_pools.iter().map(ToString::to_string).collect(),
        pools: holding.pools.iter().map(|it| it.name.clone()).collect(),
    }
}
