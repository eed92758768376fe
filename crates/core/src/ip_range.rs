//! Intervals of addresses that need not be CIDRs, such as reserved addresses and service ranges.

use std::fmt;

use super::cidr::{Addr, Cidr, Family};
use super::text::CidrError;

/// An interval of addresses of one family. Both ends are included, and `first <= last`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct IpRange {
    first: Addr,
    last: Addr,
}

/// Why a text cannot be parsed as an interval.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IpRangeError {
    /// The text contains a slash, but is not a CIDR.
    #[error(transparent)]
    Cidr(#[from] CidrError),
    /// An end of the interval is not an address in canonical form.
    #[error(
        "`{text}` is not an address in canonical form: write a CIDR, an address such as 10.0.0.7 or fd00::7, or a range such as 10.0.0.7-10.0.0.20"
    )]
    Address {
        /// The end that could not be parsed.
        text: String,
    },
    /// The ends are of different families, or the first is above the last.
    #[error("`{first}-{last}` is not a range: write the lower address first, both of one family")]
    Ends {
        /// The end that was written first.
        first: Addr,
        /// The end that was written last.
        last: Addr,
    },
}

impl IpRange {
    /// Makes an interval; `None` if the ends are of different families or `first` is above `last`.
    pub fn new(first: Addr, last: Addr) -> Option<Self> {
        (first.family == last.family && first <= last).then_some(Self { first, last })
    }

    /// Parses a CIDR, an address, or `low-high`, with or without spaces around the dash. Only canonical text is
    /// accepted, because users write intervals by hand, and a lenient parser could misread a typo and reserve the wrong
    /// addresses.
    pub fn parse(text: &str) -> Result<Self, IpRangeError> {
        if text.contains('/') {
            return Ok(Cidr::parse_strict(text)?.into());
        }
        let (low, high) = text.split_once('-').unwrap_or((text, text));
        let (first, last) = (address(low)?, address(high)?);
        Self::new(first, last).ok_or(IpRangeError::Ends { first, last })
    }

    /// The family of both ends.
    pub fn family(&self) -> Family {
        self.first.family
    }

    /// The lowest address, which belongs to the interval.
    pub fn first(&self) -> Addr {
        self.first
    }

    /// The highest address, which belongs to the interval.
    pub fn last(&self) -> Addr {
        self.last
    }

    /// Whether the interval and `cidr` have an address in common.
    pub fn overlaps(&self, cidr: &Cidr) -> bool {
        self.family() == cidr.family() && self.first <= cidr.last() && cidr.first() <= self.last
    }

    /// Returns the part of the interval that lies in `cidr`; `None` if the interval and `cidr` are disjoint.
    pub fn within(&self, cidr: &Cidr) -> Option<Self> {
        if !self.overlaps(cidr) {
            return None;
        }
        Self::new(self.first.max(cidr.first()), self.last.min(cidr.last()))
    }

    /// The number of addresses. Saturates at `u128::MAX`, which is one less than the size of `::/0`.
    pub fn size(&self) -> u128 {
        (self.last.value - self.first.value).saturating_add(1)
    }

    /// Returns the parts of the interval that lie in none of `others`, in ascending order.
    #[must_use]
    pub fn without(&self, others: &[Self]) -> Vec<Self> {
        let of_family = |it: &&Self| it.family() == self.family();
        let others = others.iter().filter(of_family).copied().collect();
        let mut parts = Vec::new();
        let mut from = Some(self.first);
        for other in Self::merged(others) {
            let Some(first) = from else { break };
            if other.first > first {
                let before = Addr {
                    value: other.first.value - 1,
                    ..other.first
                };
                parts.extend(Self::new(first, before.min(self.last)));
            }
            from = other.last.next().map(|next| next.max(first));
        }
        parts.extend(from.and_then(|first| Self::new(first, self.last)));
        parts
    }

    /// Sorts intervals of one family, and joins those that overlap or are adjacent.
    pub(super) fn merged(mut all: Vec<Self>) -> Vec<Self> {
        all.sort_unstable_by_key(|range| range.first);
        all.dedup_by(|next, kept| {
            let joins = next.first.value <= kept.last.value.saturating_add(1);
            if joins {
                kept.last = kept.last.max(next.last);
            }
            joins
        });
        all
    }

    /// Returns the smallest set of CIDRs that contains exactly the addresses of this interval, in ascending order.
    pub fn to_cidrs(&self) -> Vec<Cidr> {
        let mut cidrs = Vec::new();
        let mut from = Some(self.first);
        while let Some(first) = from.filter(|&first| first <= self.last) {
            // Finds the widest block that begins at `first` and does not extend beyond the end of the interval.
            let mut cidr = Cidr::host(first);
            while let Some(wider) = cidr
                .parent()
                .filter(|wider| wider.first() == first && wider.last() <= self.last)
            {
                cidr = wider;
            }
            cidrs.push(cidr);
            from = cidr.last().next();
        }
        cidrs
    }
}

impl From<Cidr> for IpRange {
    fn from(cidr: Cidr) -> Self {
        Self {
            first: cidr.first(),
            last: cidr.last(),
        }
    }
}

impl From<Addr> for IpRange {
    fn from(addr: Addr) -> Self {
        Self {
            first: addr,
            last: addr,
        }
    }
}

impl fmt::Display for IpRange {
    /// Writes the form that [`IpRange::parse`] accepts: `low-high`, or a single address.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last {
            return self.first.fmt(f);
        }
        write!(f, "{}-{}", self.first, self.last)
    }
}

fn address(text: &str) -> Result<Addr, IpRangeError> {
    let text = text.trim();
    Addr::parse_strict(text).ok_or_else(|| IpRangeError::Address {
        text: text.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::cidr;
    use super::*;

    fn cover(text: &str) -> Vec<String> {
        IpRange::parse(text)
            .unwrap()
            .to_cidrs()
            .iter()
            .map(Cidr::to_string)
            .collect()
    }

    #[test]
    fn a_range_has_three_forms() {
        assert_eq!(
            IpRange::parse("10.0.0.0/30").unwrap().to_string(),
            "10.0.0.0-10.0.0.3"
        );
        assert_eq!(IpRange::parse("fd00::7").unwrap().to_string(), "fd00::7");
        assert_eq!(
            IpRange::parse("10.0.0.7 - 10.0.0.9").unwrap().to_string(),
            "10.0.0.7-10.0.0.9"
        );
    }

    #[test]
    fn an_error_says_what_to_write() {
        let error = |text| IpRange::parse(text).unwrap_err().to_string();
        assert_eq!(
            error("10.0.0.5/24"),
            "`10.0.0.5/24` is not in canonical form: write `10.0.0.0/24`"
        );
        assert!(error("10.0.0.05").starts_with("`10.0.0.05` is not an address"));
        assert!(error("10.0.0.9-10.0.0.7").contains("lower address first"));
        assert!(error("10.0.0.9-fd00::1").contains("of one family"));
    }

    #[test]
    fn the_cover_is_exact_and_minimal() {
        assert_eq!(cover("10.0.0.0/24"), ["10.0.0.0/24"]);
        assert_eq!(
            cover("10.0.0.1-10.0.0.6"),
            ["10.0.0.1/32", "10.0.0.2/31", "10.0.0.4/31", "10.0.0.6/32"]
        );
        assert_eq!(cover("0.0.0.0-255.255.255.255"), ["0.0.0.0/0"]);
        assert_eq!(
            cover(
                "ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
            )
            .len(),
            1
        );
    }

    #[test]
    fn the_rest_of_a_range_is_what_no_other_covers() {
        let rest = |text: &str, others: &[&str]| -> String {
            let others: Vec<IpRange> = others
                .iter()
                .map(|it| IpRange::parse(it).unwrap())
                .collect();
            let rest = IpRange::parse(text).unwrap().without(&others);
            let rest: Vec<String> = rest.iter().map(IpRange::to_string).collect();
            rest.join(" ")
        };
        let all = "10.0.0.0/28";
        assert_eq!(rest(all, &[]), "10.0.0.0-10.0.0.15");
        assert_eq!(
            rest(all, &["10.0.0.9", "10.0.0.4-10.0.0.7", "10.0.0.5-10.0.0.6"]),
            "10.0.0.0-10.0.0.3 10.0.0.8 10.0.0.10-10.0.0.15"
        );
        assert_eq!(
            rest(all, &["10.0.0.12-10.0.1.3", "9.0.0.0/8"]),
            "10.0.0.0-10.0.0.11"
        );
        assert_eq!(
            rest(all, &["9.9.9.9-10.0.0.3", "fd00::/8"]),
            "10.0.0.4-10.0.0.15"
        );
        assert_eq!(rest(all, &["10.0.0.0/8"]), "");
        assert_eq!(
            rest("255.255.255.254/31", &["255.255.255.255"]),
            "255.255.255.254"
        );
        assert_eq!(
            rest(
                "::/0",
                &["::/1", "8000::1-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"]
            ),
            "8000::"
        );
    }

    #[test]
    fn ranges_of_different_families_never_overlap() {
        let span = IpRange::parse("10.0.0.250-10.0.1.5").unwrap();
        let overlaps = |text| span.overlaps(&cidr(text));
        assert!(overlaps("10.0.0.0/24") && overlaps("10.0.1.4/30") && overlaps("0.0.0.0/0"));
        assert!(!overlaps("10.0.1.8/29") && !overlaps("::/0"));
    }
}
