//! Addresses and CIDRs of both families in one code path.
//!
//! An address is a family and a number; an IPv4 address uses the low 32 bits of the number. So every rule about
//! intervals is written once for both families. The host bits of a [`Cidr`] are cleared on construction, so two CIDRs
//! of the same addresses are equal values.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// An IP address family. IPv4 sorts first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Family {
    /// IPv4: 32 bits
    V4,
    /// IPv6: 128 bits
    V6,
}

impl Family {
    /// Both families, IPv4 first.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// The number of bits of an address, 32 or 128, which is also the longest prefix length.
    pub const fn bits(self) -> u8 {
        match self {
            Self::V4 => 32,
            Self::V6 => 128,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

/// One address. Addresses sort by family, then by number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Addr {
    /// The family of the address. It decides how `value` is displayed, and how many bits of `value` are used.
    pub family: Family,
    /// The address as a number; IPv4 uses only the low 32 bits.
    pub value: u128,
}

impl From<IpAddr> for Addr {
    /// Keeps the family: an IPv4-mapped IPv6 address becomes an [`Addr`] of IPv6, not of IPv4.
    fn from(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(v4) => Self {
                family: Family::V4,
                value: u128::from(u32::from(v4)),
            },
            IpAddr::V6(v6) => Self {
                family: Family::V6,
                value: u128::from(v6),
            },
        }
    }
}

impl From<Addr> for IpAddr {
    fn from(addr: Addr) -> Self {
        match addr.family {
            #[expect(clippy::cast_possible_truncation, reason = "IPv4 is the low 32 bits")]
            Family::V4 => Self::V4(Ipv4Addr::from(addr.value as u32)),
            Family::V6 => Self::V6(Ipv6Addr::from(addr.value)),
        }
    }
}

impl fmt::Display for Addr {
    /// Writes IPv4 as dotted decimal and IPv6 as in RFC 5952.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        IpAddr::from(*self).fmt(f)
    }
}

/// A block of addresses with a common prefix; the host bits are always zero.
///
/// Two CIDRs are disjoint, or one contains the other. CIDRs sort by family, then first address, then prefix
/// length, so a block sorts directly before all blocks inside it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Cidr {
    family: Family,
    value: u128,
    len: u8,
}

impl Cidr {
    /// Returns the block of prefix length `len` that contains `addr`; `None` if `len` is too long for the family.
    pub fn new(addr: Addr, len: u8) -> Option<Self> {
        let order = addr.family.bits().checked_sub(len)?;
        let value = addr.value & ones(addr.family.bits()) & !ones(order);
        Some(Self {
            family: addr.family,
            value,
            len,
        })
    }

    /// Returns the block (/32 or /128) that contains only `addr`.
    pub fn host(addr: Addr) -> Self {
        Self::of_order(addr.family, addr.value & ones(addr.family.bits()), 0)
    }

    /// Returns the block of `2^order` addresses that begins at `value`. `value` must be a multiple of `2^order`.
    pub(super) fn of_order(family: Family, value: u128, order: u8) -> Self {
        Self {
            family,
            value,
            len: family.bits() - order,
        }
    }

    /// The family of all addresses in the block.
    pub fn family(&self) -> Family {
        self.family
    }

    /// The prefix length: 0 to 32 for IPv4, 0 to 128 for IPv6.
    #[expect(clippy::len_without_is_empty, reason = "a prefix length, not a count")]
    pub fn len(&self) -> u8 {
        self.len
    }

    /// The number of host bits: a block of order n has `2^n` addresses.
    pub(super) fn order(&self) -> u8 {
        self.family.bits() - self.len
    }

    /// The lowest address of the block (for IPv4 the network address).
    pub fn first(&self) -> Addr {
        Addr {
            family: self.family,
            value: self.value,
        }
    }

    /// The highest address of the block (for IPv4 the broadcast address).
    pub fn last(&self) -> Addr {
        Addr {
            family: self.family,
            value: self.value | ones(self.order()),
        }
    }

    /// Whether `other` lies inside this block or equals it.
    pub fn contains(&self, other: &Self) -> bool {
        self.len <= other.len && self.contains_addr(other.first())
    }

    /// Whether `addr` lies inside this block; `false` for an address of the other family.
    pub fn contains_addr(&self, addr: Addr) -> bool {
        self.family == addr.family && addr.value & !ones(self.order()) == self.value
    }

    /// The number of addresses. Saturates at `u128::MAX`, which is one less than the size of `::/0`.
    pub fn size(&self) -> u128 {
        1u128.checked_shl(self.order().into()).unwrap_or(u128::MAX)
    }

    /// Whether one of the two CIDRs contains the other. CIDRs cannot overlap in another way.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.contains(other) || other.contains(self)
    }

    /// Returns the block of twice the size that contains this one; `None` for `0.0.0.0/0` and `::/0`.
    pub fn parent(&self) -> Option<Self> {
        Self::new(self.first(), self.len.checked_sub(1)?)
    }

    /// Returns the smallest set of blocks that contains exactly the addresses of `all`, in ascending order.
    pub fn merged(all: impl IntoIterator<Item = Self>) -> Vec<Self> {
        let mut all: Vec<Self> = all.into_iter().collect();
        all.sort();
        let mut merged: Vec<Self> = Vec::new();
        for mut next in all {
            if merged.last().is_some_and(|last| last.contains(&next)) {
                continue;
            }
            // If `next` and the last block are the two halves of a larger block, the larger block replaces both. The
            // larger block may itself be the second half of a still larger one, so the loop repeats.
            while let Some(last) = merged.last()
                && let Some(parent) = next.parent()
                && last.parent() == Some(parent)
            {
                merged.pop();
                next = parent;
            }
            merged.push(next);
        }
        merged
    }
}

impl fmt::Display for Cidr {
    /// Writes the canonical text (RFC 5952), which is the only form that current API servers accept.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first(), self.len)
    }
}

/// Returns a number whose low `order` bits are set; `order` must be at most 128.
pub(super) const fn ones(order: u8) -> u128 {
    match u128::MAX.checked_shr(128 - order as u32) {
        Some(ones) => ones,
        None => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::cidr;
    use super::*;

    #[test]
    fn a_cidr_is_masked_when_it_is_made() {
        let addr = Addr::from("10.1.2.3".parse::<IpAddr>().unwrap());
        assert_eq!(Cidr::new(addr, 8), Some(cidr("10.0.0.0/8")));
        assert_eq!(Cidr::new(addr, 0), Some(cidr("0.0.0.0/0")));
        assert_eq!(Cidr::new(addr, 33), None);
        assert_eq!(Cidr::host(addr), cidr("10.1.2.3/32"));
    }

    #[test]
    fn first_and_last_are_inclusive_at_both_ends_of_the_family() {
        let all = cidr("::/0");
        assert_eq!((all.first().value, all.last().value), (0, u128::MAX));
        assert_eq!(cidr("0.0.0.0/0").last().to_string(), "255.255.255.255");
        assert_eq!(cidr("10.244.1.0/24").last().to_string(), "10.244.1.255");
        assert_eq!(
            cidr("fd00::/64").last().to_string(),
            "fd00::ffff:ffff:ffff:ffff"
        );
    }

    #[test]
    fn merged_blocks_are_the_fewest_of_the_same_addresses() {
        let all = [
            "10.0.3.0/24",
            "10.0.0.0/24",
            "10.0.2.0/24",
            "10.0.1.0/24",
            "10.0.1.8/30",
        ];
        let merged = |all: &[&str]| Cidr::merged(all.iter().map(|it| cidr(it)));
        assert_eq!(merged(&all), [cidr("10.0.0.0/22")]);
        let apart = [cidr("10.0.1.0/24"), cidr("10.0.2.0/24"), cidr("fd00::/64")];
        assert_eq!(merged(&["fd00::/64", "10.0.2.0/24", "10.0.1.0/24"]), apart);
        assert_eq!(merged(&["0.0.0.0/1", "128.0.0.0/1", "::/0"]).len(), 2);
    }

    #[test]
    fn two_cidrs_nest_or_are_disjoint() {
        let (wide, narrow, beside) = (cidr("10.0.0.0/8"), cidr("10.9.0.0/16"), cidr("11.0.0.0/16"));
        assert!(wide.contains(&narrow) && !narrow.contains(&wide) && wide.contains(&wide));
        assert!(wide.overlaps(&narrow) && narrow.overlaps(&wide));
        assert!(!wide.overlaps(&beside));
        assert!(!cidr("::/0").overlaps(&wide), "families never overlap");
    }

    #[test]
    fn a_parent_is_twice_the_size() {
        assert_eq!(cidr("10.0.3.0/24").parent(), Some(cidr("10.0.2.0/23")));
        assert_eq!(cidr("0.0.0.0/0").parent(), None);
    }

    #[test]
    fn a_block_sorts_before_the_blocks_inside_it() {
        let mut sorted = ["fd00::/64", "10.0.0.0/24", "10.0.0.0/8", "9.0.0.0/8"].map(cidr);
        sorted.sort();
        assert_eq!(
            sorted.map(|c| c.to_string()),
            ["9.0.0.0/8", "10.0.0.0/8", "10.0.0.0/24", "fd00::/64"]
        );
    }
}
