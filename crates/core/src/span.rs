//! Intervals that need not be CIDRs: what people reserve, and what services use.

use std::fmt;

use super::cidr::{Addr, Cidr, Family};
use super::text::CidrError;

/// An interval of one family, both ends included, `first <= last`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Span {
    first: Addr,
    last: Addr,
}

/// Why a text is no span.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpanError {
    /// It has a slash and is no CIDR.
    #[error(transparent)]
    Cidr(#[from] CidrError),
    /// One of its addresses is none.
    #[error(
        "`{text}` is not an address in canonical form: write a CIDR, an address such as 10.0.0.7 or fd00::7, or a range such as 10.0.0.7-10.0.0.20"
    )]
    Address {
        /// The address as given.
        text: String,
    },
    /// The ends are of two families, or the wrong way round.
    #[error("`{first}-{last}` is not a range: write the lower address first, both of one family")]
    Ends {
        /// The end given first.
        first: Addr,
        /// The end given last.
        last: Addr,
    },
}

impl Span {
    /// The interval from `first` to `last`; `None` if they are of two families or the wrong way
    /// round.
    pub fn new(first: Addr, last: Addr) -> Option<Self> {
        (first.family == last.family && first <= last).then_some(Self { first, last })
    }

    /// Reads a CIDR, an address, or `low-high` (spaces around the dash are taken). Canonical
    /// text only: this is what people write, and a slip here would reserve the wrong addresses.
    pub fn parse(text: &str) -> Result<Self, SpanError> {
        if text.contains('/') {
            return Ok(Cidr::parse_strict(text)?.into());
        }
        let (low, high) = text.split_once('-').unwrap_or((text, text));
        let (first, last) = (address(low)?, address(high)?);
        Self::new(first, last).ok_or(SpanError::Ends { first, last })
    }

    /// The family.
    pub fn family(&self) -> Family {
        self.first.family
    }

    /// The lowest address.
    pub fn first(&self) -> Addr {
        self.first
    }

    /// The highest address.
    pub fn last(&self) -> Addr {
        self.last
    }

    /// Whether the two share an address.
    pub fn overlaps(&self, cidr: &Cidr) -> bool {
        self.family() == cidr.family() && self.first <= cidr.last() && cidr.first() <= self.last
    }

    /// What of it lies in the range.
    pub fn within(&self, cidr: &Cidr) -> Option<Self> {
        if !self.overlaps(cidr) {
            return None;
        }
        Self::new(self.first.max(cidr.first()), self.last.min(cidr.last()))
    }

    /// The fewest CIDRs that cover exactly this interval, in order.
    pub fn to_cidrs(&self) -> Vec<Cidr> {
        let mut cidrs = Vec::new();
        let mut from = Some(self.first);
        while let Some(first) = from.filter(|&first| first <= self.last) {
            // The widest block that begins here and does not go beyond the end.
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

impl From<Cidr> for Span {
    fn from(cidr: Cidr) -> Self {
        Self {
            first: cidr.first(),
            last: cidr.last(),
        }
    }
}

impl From<Addr> for Span {
    fn from(addr: Addr) -> Self {
        Self {
            first: addr,
            last: addr,
        }
    }
}

impl fmt::Display for Span {
    /// As [`Span::parse`] reads it: `low-high`, or the address alone.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first == self.last {
            return self.first.fmt(f);
        }
        write!(f, "{}-{}", self.first, self.last)
    }
}

fn address(text: &str) -> Result<Addr, SpanError> {
    let text = text.trim();
    Addr::parse_strict(text).ok_or_else(|| SpanError::Address {
        text: text.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cover(text: &str) -> Vec<String> {
        Span::parse(text)
            .unwrap()
            .to_cidrs()
            .iter()
            .map(Cidr::to_string)
            .collect()
    }

    #[test]
    fn three_forms_are_read() {
        assert_eq!(
            Span::parse("10.0.0.0/30").unwrap().to_string(),
            "10.0.0.0-10.0.0.3"
        );
        assert_eq!(Span::parse("fd00::7").unwrap().to_string(), "fd00::7");
        assert_eq!(
            Span::parse("10.0.0.7 - 10.0.0.9").unwrap().to_string(),
            "10.0.0.7-10.0.0.9"
        );
    }

    #[test]
    fn a_slip_is_refused_with_what_to_write() {
        let error = |text| Span::parse(text).unwrap_err().to_string();
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
    fn overlap_is_judged_within_a_family() {
        let span = Span::parse("10.0.0.250-10.0.1.5").unwrap();
        let overlaps = |text| span.overlaps(&Cidr::parse_strict(text).unwrap());
        assert!(overlaps("10.0.0.0/24") && overlaps("10.0.1.4/30") && overlaps("0.0.0.0/0"));
        assert!(!overlaps("10.0.1.8/29") && !overlaps("::/0"));
    }
}
