//! Functions that tests of several modules use.

use super::{Cidr, Dual, FamilyRanges, IpRange};

pub(super) fn cidr(text: &str) -> Cidr {
    Cidr::parse_strict(text).unwrap()
}

pub(super) fn spans(texts: &[&str]) -> Vec<IpRange> {
    let spans = texts.iter().map(|text| IpRange::parse(text));
    spans.collect::<Result<_, _>>().unwrap()
}

/// Returns the ranges of a pool with one family. The first CIDR decides which family.
pub(super) fn ranges(cidrs: &[&str], block_len: u8) -> Dual<Option<FamilyRanges>> {
    let cidrs: Vec<Cidr> = cidrs.iter().map(|text| cidr(text)).collect();
    let (family, mut ranges) = (cidrs[0].family(), Dual::default());
    *ranges.get_mut(family) = Some(FamilyRanges { cidrs, block_len });
    ranges
}
