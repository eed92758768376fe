//! The nftables table that masquerades. The agent writes the table as one batch of netlink messages, which takes effect
//! completely or not at all.

use std::io;

use super::Run;
use super::netlink::{ACK, APPEND, Bytes, CREATE, EXCLUSIVE, exchange};
use cadastre_core::{Addr, Family};

const TABLE: &str = "cadastre";
const SET: &str = "pod-ranges";
const CHAIN: &str = "postrouting";
/// The id of the set within a batch.
const SET_ID: u32 = 1;

/// The kernel's `NFNL_SUBSYS_NFTABLES`
const NFTABLES: u16 = 10;
/// The kernel's `NFNL_MSG_BATCH_BEGIN`
const BATCH_BEGIN: u16 = 0x10;
/// The kernel's `NFNL_MSG_BATCH_END`
const BATCH_END: u16 = 0x11;
/// The kernel's `NFT_MSG_NEWTABLE`
const NEW_TABLE: u16 = 0;
/// The kernel's `NFT_MSG_DELTABLE`
const DELETE_TABLE: u16 = 2;
/// The kernel's `NFT_MSG_NEWCHAIN`
const NEW_CHAIN: u16 = 3;
/// The kernel's `NFT_MSG_NEWRULE`
const NEW_RULE: u16 = 6;
/// The kernel's `NFT_MSG_NEWSET`
const NEW_SET: u16 = 9;
/// The kernel's `NFT_MSG_NEWSETELEM`
const NEW_ELEMENTS: u16 = 12;

/// The kernel's `NFTA_LIST_ELEM`
const ITEM: u16 = 1;
/// The kernel's `NFTA_DATA_VALUE`
const VALUE: u16 = 1;
/// The kernel's `NFT_SET_INTERVAL`
const INTERVAL: u32 = 4;
/// The kernel's `NFT_SET_ELEM_INTERVAL_END`
const INTERVAL_END: u32 = 1;
/// The kernel's `NF_INET_POST_ROUTING`
const POSTROUTING: u32 = 4;
/// The priority of source NAT: the kernel's `NF_IP_PRI_NAT_SRC`
const SOURCE_NAT: u32 = 100;
/// The kernel's `NFT_REG_1`
const REGISTER: u32 = 1;
/// The kernel's `NFT_PAYLOAD_NETWORK_HEADER`
const NETWORK_HEADER: u32 = 1;
/// The kernel's `NFT_LOOKUP_F_INV`
const NOT_IN_SET: u32 = 1;
/// The kernel's `NF_NAT_RANGE_PROTO_RANDOM_FULLY`
const FULLY_RANDOM: u32 = 16;

/// The maximum number of elements in one attribute, because an attribute must be smaller than 64 KiB.
const ELEMENTS_AT_ONCE: usize = 1_000;

/// The values that depend on the address family.
struct Kind {
    /// `NFPROTO_*`: netfilter's number of the family
    protocol: u8,
    /// nft's number for the type of address. `nft list` needs it to show the set
    addresses: u32,
    length: u32,
    source_at: u32,
    destination_at: u32,
}

const V4: Kind = Kind {
    protocol: 2,
    addresses: 7,
    length: 4,
    source_at: 12,
    destination_at: 16,
};
const V6: Kind = Kind {
    protocol: 10,
    addresses: 8,
    length: 16,
    source_at: 8,
    destination_at: 24,
};

/// Writes the table of a family, and replaces an existing one. If `only_if_absent` is true, an existing table stays
/// unchanged. Returns whether anything was written.
pub(super) fn put(family: Family, exempt: &[Run], only_if_absent: bool) -> io::Result<bool> {
    match exchange(&table(family, exempt, only_if_absent)) {
        Ok(()) => Ok(true),
        Err(error) if only_if_absent && error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

fn table(family: Family, exempt: &[Run], only_if_absent: bool) -> Bytes {
    let kind = match family {
        Family::V4 => V4,
        Family::V6 => V6,
    };
    let send = |all: Bytes, message: u16, flags: u16, body: &Bytes| {
        all.message(NFTABLES << 8 | message, flags, kind.protocol, 0, body)
    };
    let named = || Bytes::default().text(1, TABLE);
    let mut all = Bytes::default().message(BATCH_BEGIN, 0, 0, NFTABLES, &Bytes::default());
    if only_if_absent {
        all = send(all, NEW_TABLE, CREATE | EXCLUSIVE | ACK, &named());
    } else {
        // Deleting a table that does not exist would be an error, so the table is created first.
        all = send(all, NEW_TABLE, CREATE | ACK, &named());
        all = send(all, DELETE_TABLE, 0, &named());
        all = send(all, NEW_TABLE, CREATE, &named());
    }
    let set = named()
        .text(2, SET)
        .number(3, INTERVAL)
        .number(4, kind.addresses)
        .number(5, kind.length)
        .number(10, SET_ID);
    all = send(all, NEW_SET, CREATE, &set);
    let elements: Vec<Bytes> = exempt.iter().flat_map(|run| bounds(&kind, run)).collect();
    for some in elements.chunks(ELEMENTS_AT_ONCE) {
        let list = some
            .iter()
            .fold(Bytes::default(), |list, it| list.nested(ITEM, it));
        let body = named().text(2, SET).nested(3, &list).number(4, SET_ID);
        all = send(all, NEW_ELEMENTS, CREATE, &body);
    }
    let hook = Bytes::default()
        .number(1, POSTROUTING)
        .number(2, SOURCE_NAT);
    let chain = named().text(3, CHAIN).nested(4, &hook).text(7, "nat");
    all = send(all, NEW_CHAIN, CREATE, &chain);
    let rule = named().text(2, CHAIN).nested(4, &rule(&kind));
    all = send(all, NEW_RULE, CREATE | APPEND, &rule);
    all.message(BATCH_END, 0, 0, NFTABLES, &Bytes::default())
}

/// Returns the elements of an interval set for a range: its start, and the address after its end.
fn bounds(kind: &Kind, (first, last): &Run) -> Vec<Bytes> {
    let key = |addr: &Addr, value: u128| {
        let bytes = value.to_be_bytes();
        let own = match addr.family {
            Family::V4 => &bytes[12..],
            Family::V6 => &bytes[..],
        };
        debug_assert_eq!(u32::try_from(own.len()), Ok(kind.length));
        Bytes::default().nested(1, &Bytes::default().bytes(VALUE, own))
    };
    // If a range contains the last address of its family, there is no address after its end. In this case, the range
    // has only one element.
    let whole = match last.family {
        Family::V4 => u128::from(u32::MAX),
        Family::V6 => u128::MAX,
    };
    let end = last.value.checked_add(1).filter(|it| *it <= whole);
    let end = end.map(|it| key(last, it).number(3, INTERVAL_END));
    std::iter::once(key(first, first.value))
        .chain(end)
        .collect()
}

/// Returns the rule, which masquerades a packet if its source is in the set and its destination is not in the set.
fn rule(kind: &Kind) -> Bytes {
    let expression = |list: Bytes, name: &str, data: &Bytes| {
        list.nested(ITEM, &Bytes::default().text(1, name).nested(2, data))
    };
    let address = |at: u32| {
        Bytes::default()
            .number(1, REGISTER)
            .number(2, NETWORK_HEADER)
            .number(3, at)
            .number(4, kind.length)
    };
    let lookup = || {
        Bytes::default()
            .text(1, SET)
            .number(2, REGISTER)
            .number(4, SET_ID)
    };
    let list = expression(Bytes::default(), "payload", &address(kind.source_at));
    let list = expression(list, "lookup", &lookup());
    let list = expression(list, "payload", &address(kind.destination_at));
    let list = expression(list, "lookup", &lookup().number(5, NOT_IN_SET));
    expression(list, "masq", &Bytes::default().number(1, FULLY_RANDOM))
}
