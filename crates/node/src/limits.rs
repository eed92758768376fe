//! Which addresses the configuration of a network allows, and whether a pool keeps to them.
//!
//! A configuration of whereabouts has an address range of its own. Cadastre assigns addresses only from pools, so such
//! a range is no source of addresses: it selects a pool, and restricts which of its addresses the network may get.
//!
//! # Guarantees
//! - No address outside of [`AllowedRange::allowed`] is assigned.
//! - A pool serves the network only if it reserves each of its addresses that the network does not allow. Otherwise the
//!   first pods would get addresses, and later pods would get none although the pool has free addresses.

use serde::{Deserialize, Serialize};

use cadastre_core::mutation::Mutation;
use cadastre_core::node_allocation::{FamilyTerms, Gateway, PoolTerms, Prefix, is_claim};
use cadastre_core::usable::{covering, usable};
use cadastre_core::{Addr, Cidr, Family, IpRange};

/// The default prefix lengths of a pool's blocks: for IPv4 and for IPv6.
const DEFAULT_BLOCKS: [u8; 2] = [26, 122];
/// An error lists at most this many ranges.
const MOST_LISTED: usize = 16;

/// The addresses that the configuration of a network allows.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct NetworkLimits {
    /// Name of the pool that serves the network if the node has a pool of this name; empty if the configuration names
    /// none
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub network_name: String,
    /// At most one range of each family. The network gets no address of a family without a range
    pub ranges: Vec<AllowedRange>,
}

/// A range of a network, and the addresses of it that pods may get.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct AllowedRange {
    /// The whole range, which determines the prefix length of pods' addresses
    pub cidr: Cidr,
    /// The addresses that pods may get: sorted, disjoint
    pub allowed: Vec<IpRange>,
}

impl NetworkLimits {
    /// Returns the range that allows the address.
    pub fn range_of(&self, addr: Addr) -> Option<&AllowedRange> {
        let mut ranges = self.ranges.iter();
        ranges.find(|it| covering(&it.allowed, addr).is_some())
    }

    /// Fails if the network does not allow one of the addresses. `network` is the name of the network.
    pub(crate) fn check_addresses(
        &self,
        network: &str,
        addresses: impl IntoIterator<Item = Addr>,
    ) -> Result<(), String> {
        let mut addresses = addresses.into_iter();
        match addresses.find(|it| self.range_of(*it).is_none()) {
            Some(addr) if !Mutation::NetworkRangeIgnored.is_on() => Err(format!(
                "{}, and not {addr}: ask for another address, or change the network's configuration.",
                self.text(network)
            )),
            _ => Ok(()),
        }
    }

    /// Returns the name of the pool that serves the network: the one with the name [`Self::network_name`], or else the
    /// only one with addresses that the network allows. `pools` are the pools of the node.
    pub(crate) fn pool<'a>(
        &self,
        network: &str,
        pools: &'a [PoolTerms],
    ) -> Result<&'a str, String> {
        let pools = pools.iter().filter(|it| !is_claim(&it.name));
        let mut names = pools.clone().map(|it| it.name.as_str());
        if let Some(name) = names.find(|it| *it == self.network_name) {
            return Ok(name);
        }
        let fitting = pools.filter(|pool| self.ranges.iter().any(|it| it.meets(pool)));
        let fitting: Vec<&str> = fitting.map(|it| it.name.as_str()).collect();
        match fitting[..] {
            [name] => Ok(name),
            [] => Err(format!(
                "{}, and no pool of this node has any of these addresses: create a pool that takes this node in, such as {}",
                self.text(network),
                self.example()
            )),
            _ => Err(format!(
                "{}, and several pools have some of these addresses ({}): name one of them in `pools` of the network's ipam.",
                self.text(network),
                fitting.join(", ")
            )),
        }
    }

    /// Fails if the pool could give the network an address that the network does not allow, or lacks a family of the
    /// network.
    pub(crate) fn check_pool(&self, network: &str, pool: &PoolTerms) -> Result<(), String> {
        let name = &pool.name;
        let has = |family| self.ranges.iter().any(|it| it.cidr.family() == family);
        for family in Family::ALL {
            let field = field(family);
            let what = match (has(family), pool.family(family)) {
                (true, None) => format!(
                    "has no {family} addresses: add `{field}` to the spec of IPPool {name}, or remove the {family} range from the network's ipam"
                ),
                (false, Some(_)) => format!(
                    "gives {family} addresses, too: use a pool without `{field}`, or add the range to `ipRanges` of the network's ipam"
                ),
                _ => continue,
            };
            return Err(self.mismatch(network, &format!("pool `{name}` {what}.")));
        }
        let forbidden = self.forbidden(pool);
        if forbidden.is_empty() || Mutation::MismatchedPoolServes.is_on() {
            return Ok(());
        }
        let text = if self.ranges.iter().all(|it| it.meets(pool)) {
            format!(
                "pool `{name}` would also give {}: add these to `reserved` in the spec of IPPool {name}, as [{}], or change the range in the network's ipam.",
                list(&forbidden, " and "),
                quoted(&forbidden)
            )
        } else {
            format!(
                "pool `{name}` has other addresses: name another pool in `pools` of the network's ipam, or create one such as {}",
                self.example()
            )
        };
        Err(self.mismatch(network, &text))
    }

    /// Returns the addresses that the pool may assign and the network does not allow.
    fn forbidden(&self, pool: &PoolTerms) -> Vec<IpRange> {
        let mut forbidden = Vec::new();
        for range in &self.ranges {
            let family = pool.family(range.cidr.family());
            for cidr in family.iter().flat_map(|it| &it.cidrs) {
                let never = usable(*cidr, Some(pool)).excluded;
                let fine = [&range.allowed[..], &never, &pool.reserved].concat();
                forbidden.extend(IpRange::from(*cidr).without(&fine));
            }
        }
        forbidden
    }

    fn mismatch(&self, network: &str, text: &str) -> String {
        format!("{}, and {text}", self.text(network))
    }

    /// Returns a clause for error messages: which addresses the network allows.
    fn text(&self, network: &str) -> String {
        let allowed = self.ranges.iter().flat_map(|it| it.allowed.iter().copied());
        let allowed: Vec<IpRange> = allowed.collect();
        format!(
            "network `{network}` allows only {}",
            list(&allowed, " and ")
        )
    }

    /// Returns an IPPool that would serve the network, as YAML on one line for error messages.
    fn example(&self) -> String {
        let family = |family| {
            let mut ranges = self.ranges.iter();
            let range = ranges.find(|it| it.cidr.family() == family)?;
            Some(FamilyTerms {
                cidrs: vec![range.cidr],
                gateway: Gateway::None,
            })
        };
        let name = Some(self.network_name.as_str()).filter(|it| !it.is_empty());
        let pool = PoolTerms {
            ipv4: family(Family::V4),
            ipv6: family(Family::V6),
            prefix: Prefix::Pool,
            ..PoolTerms::named(name.unwrap_or("NAME"))
        };
        let mut spec =
            vec!["allocationMode: Blocks, assignment: Manual, addressPrefix: Pool".to_owned()];
        for (range, by_default) in Family::ALL.into_iter().zip(DEFAULT_BLOCKS) {
            let family = pool.family(range);
            for cidr in family.iter().flat_map(|it| &it.cidrs) {
                // The API server rejects a block size that does not fit into the range.
                let size = if cidr.len() > by_default {
                    let size = (cidr.len() + 2).min(range.bits());
                    format!(", blockSize: {size}")
                } else {
                    String::new()
                };
                let field = field(range);
                spec.push(format!(
                    "{field}: {{cidrs: [\"{cidr}\"], gateway: None{size}}}"
                ));
            }
        }
        let reserved = self.forbidden(&pool);
        if !reserved.is_empty() {
            spec.push(format!("reserved: [{}]", quoted(&reserved)));
        }
        format!(
            "{{apiVersion: cadastre.dev/v1alpha1, kind: IPPool, metadata: {{name: {}}}, spec: {{{}}}}}",
            pool.name,
            spec.join(", ")
        )
    }
}

impl AllowedRange {
    /// Returns whether the pool has an address that the range allows.
    fn meets(&self, pool: &PoolTerms) -> bool {
        let family = pool.family(self.cidr.family());
        let mut cidrs = family.iter().flat_map(|it| &it.cidrs);
        cidrs.any(|cidr| self.allowed.iter().any(|it| it.overlaps(cidr)))
    }
}

/// Returns the name of the field of an IPPool that has the family's ranges.
fn field(family: Family) -> &'static str {
    match family {
        Family::V4 => "ipv4",
        Family::V6 => "ipv6",
    }
}

fn quoted(ranges: &[IpRange]) -> String {
    let quoted = ranges.iter().map(|it| format!("\"{it}\""));
    quoted.collect::<Vec<_>>().join(", ")
}

fn list(ranges: &[IpRange], last: &str) -> String {
    let shown = ranges.iter().take(MOST_LISTED);
    let mut texts: Vec<String> = shown.map(IpRange::to_string).collect();
    if ranges.len() > MOST_LISTED {
        texts.push(format!("{} more ranges", ranges.len() - MOST_LISTED));
    }
    match texts.split_last() {
        None => "no address".to_owned(),
        Some((only, [])) => only.clone(),
        Some((end, others)) => format!("{}{last}{end}", others.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cidr(text: &str) -> Cidr {
        Cidr::parse_strict(text).unwrap()
    }

    fn spans(texts: &[&str]) -> Vec<IpRange> {
        let parse = |it: &&str| IpRange::parse(it).unwrap();
        texts.iter().map(parse).collect()
    }

    /// Returns a pool with these ranges, and with these reserved addresses.
    fn pool(name: &str, cidrs: &[&str], reserved: &[&str]) -> PoolTerms {
        let family = |family| {
            let cidrs = cidrs.iter().map(|it| cidr(it));
            let cidrs: Vec<Cidr> = cidrs.filter(|it| it.family() == family).collect();
            let gateway = Gateway::None;
            (!cidrs.is_empty()).then_some(FamilyTerms { cidrs, gateway })
        };
        PoolTerms {
            ipv4: family(Family::V4),
            ipv6: family(Family::V6),
            reserved: spans(reserved),
            prefix: Prefix::Pool,
            ..PoolTerms::named(name)
        }
    }

    /// Returns limits of one IPv4 range.
    fn limits(range: &str, allowed: &[&str]) -> NetworkLimits {
        NetworkLimits {
            ranges: vec![AllowedRange {
                cidr: cidr(range),
                allowed: spans(allowed),
            }],
            ..NetworkLimits::default()
        }
    }

    fn small() -> NetworkLimits {
        let allowed = ["192.168.2.225-192.168.2.227", "192.168.2.232-192.168.2.238"];
        limits("192.168.2.224/28", &allowed)
    }

    #[test]
    fn a_pool_has_to_reserve_what_the_network_does_not_allow() {
        let check = |pool: &PoolTerms| small().check_pool("storage", pool);
        let whole = ["192.168.2.224/28"];
        assert_eq!(check(&pool("a", &whole, &["192.168.2.228/30"])), Ok(()));
        assert_eq!(check(&pool("a", &["192.168.2.232/30"], &[])), Ok(()));
        assert_eq!(
            check(&pool("a", &whole, &["192.168.2.228"])).unwrap_err(),
            "network `storage` allows only 192.168.2.225-192.168.2.227 and 192.168.2.232-192.168.2.238, and pool `a` \
             would also give 192.168.2.229-192.168.2.231: add these to `reserved` in the spec of IPPool a, as \
             [\"192.168.2.229-192.168.2.231\"], or change the range in the network's ipam."
        );
        // With another prefix, the pool would assign the first and the last address of its range.
        let host = PoolTerms {
            prefix: Prefix::Host,
            ..pool("a", &whole, &["192.168.2.228/30"])
        };
        let error = check(&host).unwrap_err();
        assert!(
            error.contains("192.168.2.224 and 192.168.2.239:"),
            "{error}"
        );
        // The rest of a wider pool has to be reserved, too.
        let wide = pool("a", &["192.168.2.0/24"], &["192.168.2.228/30"]);
        let error = check(&wide).unwrap_err();
        assert!(error.contains("192.168.2.1-192.168.2.224"), "{error}");
        let error = check(&pool("a", &["10.0.0.0/24"], &[])).unwrap_err();
        assert!(error.contains("has other addresses"), "{error}");
    }

    #[test]
    fn pool_and_network_have_the_same_families() {
        let check = |pool: &PoolTerms| small().check_pool("storage", pool).unwrap_err();
        let both = pool("a", &["192.168.2.232/30", "fd00::/120"], &[]);
        let error = check(&both);
        assert!(error.contains("gives IPv6 addresses, too"), "{error}");
        let error = check(&pool("a", &["fd00::/120"], &[]));
        assert!(
            error.contains("add `ipv4` to the spec of IPPool a"),
            "{error}"
        );
    }

    #[test]
    fn the_pool_is_found_by_its_name_or_by_its_addresses() {
        let pools = [
            pool("other", &["10.0.0.0/24"], &[]),
            pool("a", &["192.168.2.224/29"], &[]),
            pool("shop/db", &["192.168.2.233/32"], &[]),
        ];
        let find = |limits: &NetworkLimits, pools: &[PoolTerms]| {
            limits.pool("storage", pools).map(str::to_owned)
        };
        let named = |name: &str| NetworkLimits {
            network_name: name.to_owned(),
            ..small()
        };
        assert_eq!(find(&small(), &pools), Ok("a".to_owned()));
        assert_eq!(find(&named("other"), &pools), Ok("other".to_owned()));
        assert_eq!(find(&named("tenant"), &pools), Ok("a".to_owned()));
        let more = [&pools[..], &[pool("b", &["192.168.2.232/29"], &[])]].concat();
        let text = find(&small(), &more).unwrap_err();
        assert!(
            text.contains("several pools have some of these addresses (a, b)"),
            "{text}"
        );
        let text = find(&named("tenant"), &pools[..1]).unwrap_err();
        let example = "such as {apiVersion: cadastre.dev/v1alpha1, kind: IPPool, metadata: {name: tenant}, spec: \
                       {allocationMode: Blocks, assignment: Manual, addressPrefix: Pool, ipv4: \
                       {cidrs: [\"192.168.2.224/28\"], gateway: None, blockSize: 30}, \
                       reserved: [\"192.168.2.228-192.168.2.231\"]}}";
        assert!(text.ends_with(example), "{text}");
        // The pool of the example keeps to the network's limits.
        let written = pool(
            "tenant",
            &["192.168.2.224/28"],
            &["192.168.2.228-192.168.2.231"],
        );
        assert_eq!(small().check_pool("storage", &written), Ok(()));
    }

    #[test]
    fn only_allowed_addresses_pass() {
        let check = |text: &str| {
            let addr = Addr::parse_strict(text).unwrap();
            small().check_addresses("storage", [addr])
        };
        assert_eq!(check("192.168.2.238"), Ok(()));
        for text in ["192.168.2.224", "192.168.2.228", "192.168.2.239", "fd00::1"] {
            let error = check(text).unwrap_err();
            assert!(error.contains(&format!("and not {text}:")), "{error}");
        }
    }
}
