//! Serialization of addresses, CIDRs and intervals as text. Deserialization accepts canonical text only.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, Visitor};
use serde::ser::{Serialize, Serializer};

use super::{Addr, Cidr, IpRange};

struct Text<T>(fn(&str) -> Result<T, String>, PhantomData<T>);

impl<T> Visitor<'_> for Text<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("canonical text of addresses")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        (self.0)(text).map_err(E::custom)
    }
}

macro_rules! text {
    ($type:ty, $read:expr) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_str(Text($read, PhantomData))
            }
        }
    };
}

text!(Addr, |text| {
    Addr::parse_strict(text).ok_or_else(|| format!("`{text}` is not an address in canonical form"))
});
text!(Cidr, |text| Cidr::parse_strict(text)
    .map_err(|error| error.to_string()));
text!(IpRange, |text| IpRange::parse(text)
    .map_err(|error| error.to_string()));
