//! Decides on the default pool of a cluster that has none.
//!
//! The ranges come from the first of these sources that names any: the flags, then kubeadm's podSubnet, then a private
//! range that overlaps neither nodes nor services. The default pool is an ordinary pool, which can be changed like any
//! other.
//!
//! # Guarantees
//! - The default pool always has the same name and is never updated. So if two controllers choose different ranges, the
//!   API server rejects the second creation.
//! - One source decides alone: if it names ranges of one family only, the pool has no other family. Ranges of both
//!   families become one dual-stack pool, because a node gets all its ranges from one pool.
//! - If a source cannot be read, no pool is created. The source is not skipped, because the next source would supply
//!   ranges that the administrator did not intend.
//!
//! # Caveats
//! - If the default pool was the only pool and is deleted, it is created again. To delete it for good, create another
//!   pool first. To keep it but allocate nothing from it, set its field `disabled`.

use std::fmt;

use serde::Deserialize;

use cadastre_api::{AllocationMode, IPPool, IPPoolSpec};
use cadastre_core::{Addr, Cidr, CidrError, Dual, Family};

/// Name of the default pool. It is fixed, so that the API server rejects a second default pool.
pub(crate) const NAME: &str = "default";

/// Location of kubeadm's configuration: namespace, ConfigMap, key.
pub(crate) const KUBEADM: (&str, &str, &str) =
    ("kube-system", "kubeadm-config", "ClusterConfiguration");

/// Private ranges in the order in which they are tried. The usual range comes first. The others are ranges that clouds
/// and hosts seldom use.
const PRIVATE: Dual<&[&str]> = Dual {
    v4: &[
        "10.244.0.0/16",
        "10.64.0.0/14",
        "10.128.0.0/14",
        "10.192.0.0/14",
        "172.20.0.0/14",
        "192.168.0.0/16",
        "100.64.0.0/12",
        "100.80.0.0/12",
        "100.96.0.0/12",
        "100.112.0.0/12",
    ],
    v6: &[
        "fd00:10:244::/48",
        "fd00:10:64::/48",
        "fd00:10:128::/48",
        "fd00:10:192::/48",
        "fd00:172:20::/48",
        "fd00:192:168::/48",
        "fd00:100:64::/48",
    ],
};

/// The facts about the cluster from which [`decide`] derives the default pool.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cluster<'a> {
    /// Ranges from flags; empty if the flags name none
    pub flags: &'a [Cidr],
    /// kubeadm's configuration, as read from [`KUBEADM`]; `None` if the cluster has no such ConfigMap
    pub kubeadm: Option<&'a str>,
    /// Addresses of all nodes, which a private range must not contain
    pub node_addresses: &'a [Addr],
    /// Service ranges from ServiceCIDR objects and from the settings
    pub services: &'a [Cidr],
}

/// The source that named the ranges of the default pool, for error messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Flags,
    Kubeadm,
    Private,
}

/// Why no default pool can be created. An administrator must act, except after [`BootstrapError::NoNode`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BootstrapError {
    /// No node has an address yet, so it is unknown which families and ranges are suitable.
    #[error(
        "no default pool is made before a node has an address: flags and kubeadm name no range, and a private one must not overlap the nodes"
    )]
    NoNode,
    /// The ConfigMap `kubeadm-config` exists but does not contain a valid ClusterConfiguration.
    #[error(
        "no default pool: ClusterConfiguration in ConfigMap kube-system/kubeadm-config cannot be read: correct it, or create an IPPool: {why}"
    )]
    Kubeadm { why: String },
    /// A part of `networking.podSubnet` is not a CIDR.
    #[error(
        "no default pool: networking.podSubnet in ConfigMap kube-system/kubeadm-config is unclear: correct it, or create an IPPool: {0}"
    )]
    PodSubnet(CidrError),
    /// A range is smaller than one block.
    #[error(
        "no default pool: {range} ({from}) is smaller than the /{block} that a node gets: give a wider range, or create an IPPool with a larger blockSize"
    )]
    TooSmall {
        range: Cidr,
        /// Prefix length of a block
        block: u32,
        from: Source,
    },
    /// All private ranges of a family overlap nodes or services.
    #[error(
        "no default pool: nodes or services have addresses in each of the private {family} ranges that are tried ({}): create an IPPool with a range of your own",
        PRIVATE.get(*family).join(", ")
    )]
    NoPrivateRange { family: Family },
}

/// Returns the default pool to create, for a cluster without any pool.
pub(crate) fn decide(
    cluster: &Cluster,
    allocate: AllocationMode,
) -> Result<IPPool, BootstrapError> {
    if !cluster.flags.is_empty() {
        return create(cluster.flags, Source::Flags, allocate);
    }
    let networking = cluster.kubeadm.map(networking).transpose()?;
    let Networking {
        pod_subnet,
        service_subnet,
    } = networking.unwrap_or_default();
    let pods = subnets(pod_subnet.as_deref())
        .map(Cidr::parse_lenient)
        .collect::<Result<Vec<_>, _>>()
        .map_err(BootstrapError::PodSubnet)?;
    if !pods.is_empty() {
        return create(&pods, Source::Kubeadm, allocate);
    }
    if cluster.node_addresses.is_empty() {
        return Err(BootstrapError::NoNode);
    }
    // An invalid serviceSubnet is ignored, because it is only a hint. ServiceCIDR objects, if they exist, are more
    // reliable.
    let hinted =
        subnets(service_subnet.as_deref()).filter_map(|text| Cidr::parse_lenient(text).ok());
    let services: Vec<Cidr> = cluster.services.iter().copied().chain(hinted).collect();
    let mut ranges = Vec::new();
    for family in Family::ALL {
        if cluster.node_addresses.iter().any(|it| it.family == family) {
            ranges.push(private(family, cluster.node_addresses, &services)?);
        }
    }
    create(&ranges, Source::Private, allocate)
}

fn create(
    ranges: &[Cidr],
    from: Source,
    allocate: AllocationMode,
) -> Result<IPPool, BootstrapError> {
    let of = |family| {
        let texts = ranges.iter().filter(|range| range.family() == family);
        texts.map(ToString::to_string).collect()
    };
    let spec = IPPoolSpec::new(allocate, of(Family::V4), of(Family::V6));
    let blocks = Dual {
        v4: spec.ipv4_block_size(),
        v6: spec.ipv6_block_size(),
    };
    for range in ranges {
        if let Some(block) = blocks
            .get(range.family())
            .filter(|len| u32::from(range.len()) > *len)
        {
            return Err(BootstrapError::TooSmall {
                range: *range,
                block,
                from,
            });
        }
    }
    Ok(IPPool::new(NAME, spec))
}

/// Returns the first private range that contains no node's address and overlaps no service range.
fn private(family: Family, nodes: &[Addr], services: &[Cidr]) -> Result<Cidr, BootstrapError> {
    let is_free = |range: &Cidr| {
        !nodes.iter().any(|address| range.contains_addr(*address))
            && !services.iter().any(|service| service.overlaps(range))
    };
    let texts = PRIVATE.get(family).iter();
    texts
        .filter_map(|text| Cidr::parse_strict(text).ok())
        .find(is_free)
        .ok_or(BootstrapError::NoPrivateRange { family })
}

/// The part of kubeadm's ClusterConfiguration that the controller reads.
#[derive(Deserialize, Default)]
struct ClusterConfiguration {
    networking: Option<Networking>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase")]
struct Networking {
    pod_subnet: Option<String>,
    service_subnet: Option<String>,
}

fn networking(text: &str) -> Result<Networking, BootstrapError> {
    let read: Result<ClusterConfiguration, _> = serde_saphyr::from_str(text);
    let configuration = read.map_err(|error| BootstrapError::Kubeadm {
        why: error.without_snippet().to_string(),
    })?;
    Ok(configuration.networking.unwrap_or_default())
}

/// Returns the non-empty parts of a comma-separated list.
fn subnets(text: Option<&str>) -> impl Iterator<Item = &str> {
    let parts = text.unwrap_or_default().split(',');
    parts.map(str::trim).filter(|part| !part.is_empty())
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Source::Flags => "from the flags of the controller",
            Source::Kubeadm => "from networking.podSubnet in ConfigMap kube-system/kubeadm-config",
            Source::Private => "a private range in which no node or service has an address",
        })
    }
}

#[cfg(test)]
mod tests;
