//! Parsing of addresses and CIDRs.
//!
//! There is a strict and a lenient parser. The strict parser accepts only canonical text, which is also what Cadastre
//! writes: since 1.36, API servers reject leading zeros, host bits and IPv4-mapped addresses. The lenient parser is for
//! text that older API servers have stored, which may contain leading zeros, host bits and IPv4-mapped addresses. A
//! podCIDR in such a form stays for the life of its node, and its addresses are in use. So the lenient parser must read
//! the podCIDR exactly as the older API servers did.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::cidr::{Addr, Cidr, Family, ones};

/// Why a text cannot be parsed as a CIDR.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CidrError {
    /// The text is not an address, a slash and a number.
    #[error(
        "`{text}` is not a CIDR: write an address, `/` and a prefix length, for example 10.244.0.0/16 or fd00:10:244::/56"
    )]
    Syntax {
        /// The text as it was passed in.
        text: String,
    },
    /// The prefix is longer than an address of the family.
    #[error("`{text}` has too long a prefix: {family} takes at most /{}", family.bits())]
    TooLong {
        /// The text as it was passed in.
        text: String,
        /// The family of the address in the text.
        family: Family,
    },
    /// The text denotes a block, but in a form that API servers reject.
    #[error("`{text}` is not in canonical form: write `{canonical}`")]
    NotCanonical {
        /// The text as it was passed in.
        text: String,
        /// The block that the text denotes. Its `Display` writes the canonical form.
        canonical: Cidr,
    },
}

impl Cidr {
    /// Parses canonical text only: the address as in RFC 5952, no host bits, no leading zeros, no IPv4-mapped IPv6.
    pub fn parse_strict(text: &str) -> Result<Self, CidrError> {
        let cidr = Self::parse_lenient(text)?;
        if cidr.to_string() == text {
            return Ok(cidr);
        }
        Err(CidrError::NotCanonical {
            text: text.to_owned(),
            canonical: cidr,
        })
    }

    /// Parses text that older API servers accepted. Host bits are masked. IPv4 octets with leading zeros are
    /// decimal. Hexadecimal digits may be upper case. An IPv4-mapped IPv6 prefix of at least 96 bits becomes the
    /// corresponding IPv4 block.
    pub fn parse_lenient(text: &str) -> Result<Self, CidrError> {
        let syntax = || CidrError::Syntax {
            text: text.to_owned(),
        };
        let (ip, len) = text.split_once('/').ok_or_else(syntax)?;
        let ip = ip_lenient(ip).ok_or_else(syntax)?;
        let len = decimal(len).ok_or_else(syntax)?;
        let (addr, len) = match ip {
            IpAddr::V6(v6) if len >= 96 => match v6.to_ipv4_mapped() {
                Some(v4) => (Addr::from(IpAddr::V4(v4)), len - 96),
                None => (Addr::from(ip), len),
            },
            _ => (Addr::from(ip), len),
        };
        let too_long = || CidrError::TooLong {
            text: text.to_owned(),
            family: Addr::from(ip).family,
        };
        let len = u8::try_from(len).map_err(|_| too_long())?;
        Self::new(addr, len).ok_or_else(too_long)
    }
}

impl Addr {
    /// Parses an address as older API servers did: IPv4 octets with leading zeros are decimal, and an
    /// IPv4-mapped IPv6 address becomes IPv4. Returns `None` if the text is not an address.
    pub fn parse_lenient(text: &str) -> Option<Self> {
        let ip = ip_lenient(text)?;
        Some(Self::from(ip.to_canonical()))
    }

    /// Parses canonical text only; returns `None` for anything else.
    pub fn parse_strict(text: &str) -> Option<Self> {
        Self::parse_lenient(text).filter(|addr| addr.to_string() == text)
    }

    /// Returns the next higher address; `None` for the last address of the family.
    pub(super) fn next(self) -> Option<Self> {
        let value = self
            .value
            .checked_add(1)
            .filter(|&value| value <= ones(self.family.bits()))?;
        Some(Self { value, ..self })
    }
}

fn ip_lenient(text: &str) -> Option<IpAddr> {
    if !text.contains(':') {
        return ipv4_lenient(text).map(IpAddr::V4);
    }
    let v6 = match text.rsplit_once(':') {
        // The dotted IPv4 part at the end is rewritten as two hexadecimal groups, because `Ipv6Addr` rejects octets
        // with leading zeros.
        Some((head, tail)) if tail.contains('.') => {
            let tail = u32::from(ipv4_lenient(tail)?);
            format!("{head}:{:x}:{:x}", tail >> 16, tail & 0xffff).parse()
        }
        _ => text.parse::<Ipv6Addr>(),
    };
    v6.ok().map(IpAddr::V6)
}

fn ipv4_lenient(text: &str) -> Option<Ipv4Addr> {
    let mut octets = [0; 4];
    let mut parts = text.split('.');
    for octet in &mut octets {
        *octet = u8::try_from(decimal(parts.next()?)?).ok()?;
    }
    parts.next().is_none().then(|| Ipv4Addr::from(octets))
}

/// Parses a number that consists of digits only. `u16::from_str` would accept a sign, too.
fn decimal(text: &str) -> Option<u16> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lenient(text: &str) -> String {
        Cidr::parse_lenient(text).unwrap().to_string()
    }

    #[test]
    fn canonical_text_is_parsed_and_formatted_the_same() {
        for text in [
            "0.0.0.0/0",
            "10.244.3.0/24",
            "10.0.0.1/32",
            "::/0",
            "fd00:10:244::/56",
            "2001:db8::1/128",
            "1:0:0:2::/64",
            "::102:300/120",
        ] {
            assert_eq!(Cidr::parse_strict(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn text_of_old_servers_is_parsed_as_they_parsed_it() {
        assert_eq!(lenient("10.244.3.7/24"), "10.244.3.0/24");
        assert_eq!(lenient("010.244.003.000/024"), "10.244.3.0/24");
        assert_eq!(lenient("FD00:0:0::0/64"), "fd00::/64");
        assert_eq!(lenient("::ffff:10.244.3.0/120"), "10.244.3.0/24");
        assert_eq!(lenient("::FFFF:010.244.3.9/120"), "10.244.3.0/24");
        assert_eq!(lenient("::ffff:0af4:0300/120"), "10.244.3.0/24");
        assert_eq!(lenient("::10.0.0.1/128"), "::a00:1/128");
        assert_eq!(
            lenient("::ffff:10.0.0.0/80"),
            "::/80",
            "wider than the mapped block"
        );
    }

    #[test]
    fn the_strict_parser_rejects_text_and_says_what_to_write() {
        for (text, canonical) in [
            ("10.244.3.7/24", "10.244.3.0/24"),
            ("10.244.03.0/24", "10.244.3.0/24"),
            ("10.244.3.0/024", "10.244.3.0/24"),
            ("FD00::/64", "fd00::/64"),
            ("fd00:0::/64", "fd00::/64"),
            ("::ffff:10.244.3.0/120", "10.244.3.0/24"),
        ] {
            let error = Cidr::parse_strict(text).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("`{text}` is not in canonical form: write `{canonical}`")
            );
        }
    }

    #[test]
    fn both_parsers_reject_text_that_is_no_cidr() {
        for text in [
            "",
            "/",
            "10.0.0.0",
            "10.0.0.0/",
            "10.0.0/24",
            "10.0.0.0.0/24",
            "256.0.0.0/8",
            "10.0.0.0/+8",
            "10.0.0.0/8 ",
            "fe80::1%eth0/64",
            "::1::/64",
            "1:2:3:4:5:6:7:1.2.3.4/64",
            "0x0a.0.0.0/8",
            "10..0.0/8",
        ] {
            assert_eq!(
                Cidr::parse_lenient(text),
                Err(CidrError::Syntax {
                    text: text.to_owned()
                })
            );
        }
        for text in ["10.0.0.0/33", "::/129", "::/65535", "10.0.0.0/256"] {
            assert!(
                matches!(Cidr::parse_lenient(text), Err(CidrError::TooLong { .. })),
                "{text}"
            );
        }
    }

    #[test]
    fn addresses_have_a_strict_and_a_lenient_parser() {
        assert_eq!(
            Addr::parse_lenient("010.0.0.01").unwrap().to_string(),
            "10.0.0.1"
        );
        assert_eq!(
            Addr::parse_lenient("::ffff:10.0.0.1").unwrap().to_string(),
            "10.0.0.1"
        );
        assert_eq!(Addr::parse_strict("010.0.0.1"), None);
        assert_eq!(
            Addr::parse_strict("fd00::1").unwrap().to_string(),
            "fd00::1"
        );
    }
}
