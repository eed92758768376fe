//! Serialization of addresses, CIDRs and intervals as text. Deserialization accepts canonical text only.

use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::{Serialize, Serializer};

use super::{Addr, Cidr, IpRange};

macro_rules! text {
    ($type:ty, $read:expr) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                let read: fn(&str) -> Result<Self, String> = $read;
                read(&text).map_err(Error::custom)
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
