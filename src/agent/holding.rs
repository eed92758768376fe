//! The NodeSubnet as what the store holds.

use crate::api::{NodeSubnetSpec, Recall};
use crate::ipam::{Cidr, Span};
use crate::node::{Block, Holding, PoolTerms};

/// What a NodeSubnet says that the node holds. What cannot be read of it is left out.
pub fn read(spec: &NodeSubnetSpec) -> Holding {
    let node_uid = spec.node_uid.clone().unwrap_or_default();
    let cidr = |text: &str| Cidr::parse_lenient(text).ok();
    let ranges = spec.pod_cidrs.iter().filter_map(|it| {
        Some(Block {
            cidr: cidr(&it.cidr)?,
            uid: node_uid.clone(),
            pool: it.pool.clone().unwrap_or_default(),
            draining: false,
            reserved: Vec::new(),
        })
    });
    let blocks = spec.blocks.iter().filter_map(|it| {
        Some(Block {
            cidr: cidr(&it.cidr)?,
            uid: it.uid.clone(),
            pool: it.pool.clone(),
            draining: it.recall == Some(Recall::Drain),
            reserved: it
                .reserved
                .iter()
                .filter_map(|it| Span::parse(it).ok())
                .collect(),
        })
    });
    let mut blocks: Vec<Block> = ranges.chain(blocks).collect();
    blocks.sort_by_key(|it| it.cidr);
    Holding {
        node_uid,
        blocks,
        pools: spec.pools.iter().map(|it| PoolTerms::named(it)).collect(),
    }
}
