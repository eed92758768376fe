//! The kernel's table of neighbours (`ip neigh`). The kernel sends the ARP requests and neighbour solicitations, so no
//! raw socket is needed. No function here waits.

use std::fs;
use std::io;
use std::net::IpAddr;

use netlink_packet_core::NLM_F_CREATE;
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rustix::io::Errno;

use super::netlink::{exchange, is_errno};

/// The scope of link-local addresses in `/proc/net/if_inet6`.
const LINK_SCOPE: u8 = 0x20;
/// The flag in `/proc/net/if_inet6` of an address that the kernel does not use, because another host has the address.
const DAD_FAILED: u8 = 0x08;
/// The flag in `/proc/net/if_inet6` of an address that the kernel does not use yet, because another host may have the
/// address.
const TENTATIVE: u8 = 0x40;

/// An interface on which the kernel can ask other hosts for an address.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    index: u32,
    /// The link-layer address of the interface itself
    own: Vec<u8>,
}

/// Looks up the interface with this name. Fails if the interface does not exist, is down, or uses neither ARP nor
/// neighbour solicitations.
pub(crate) fn link(name: &str) -> io::Result<Link> {
    let mut question = LinkMessage::default();
    question
        .attributes
        .push(LinkAttribute::IfName(name.to_owned()));
    let answers = exchange(RouteNetlinkMessage::GetLink(question), 0).map_err(|error| {
        if is_errno(&error, Errno::NODEV) {
            return io::Error::other(format!("the node has no interface `{name}`"));
        }
        error
    })?;
    let link = answers.into_iter().find_map(|it| match it {
        RouteNetlinkMessage::NewLink(link) => Some(link),
        _ => None,
    });
    let link = link.ok_or_else(|| io::Error::other("the kernel does not answer"))?;
    let flags = link.header.flags;
    if flags.intersects(LinkFlags::Noarp | LinkFlags::Loopback) {
        let text = format!("interface `{name}` has no neighbours: it is no Ethernet interface");
        return Err(io::Error::other(text));
    }
    if !flags.contains(LinkFlags::Up | LinkFlags::Running) {
        return Err(io::Error::other(format!("interface `{name}` is down")));
    }
    let own = link.attributes.into_iter().find_map(|it| match it {
        LinkAttribute::Address(own) => Some(own),
        _ => None,
    });
    Ok(Link {
        index: link.header.index,
        own: own.unwrap_or_default(),
    })
}

/// Fails if the interface has no usable link-local IPv6 address, because the kernel then sends no neighbour
/// solicitations.
pub(crate) fn check_ipv6(name: &str) -> io::Result<()> {
    let all = fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
    if can_solicit(&all, name) {
        return Ok(());
    }
    let text = format!("interface `{name}` has no link-local IPv6 address to ask from");
    Err(io::Error::other(text))
}

fn can_solicit(if_inet6: &str, name: &str) -> bool {
    if_inet6.lines().any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, _, _, scope, flags, of] = fields[..] else {
            return false;
        };
        let number = |text| u8::from_str_radix(text, 16).unwrap_or_default();
        of == name && number(scope) == LINK_SCOPE && number(flags) & (DAD_FAILED | TENTATIVE) == 0
    })
}

/// Makes the kernel ask the hosts on the link which of them has the address. Returns before an answer arrives.
pub(crate) fn ask(link: &Link, address: IpAddr) -> io::Result<()> {
    match get(link, address)? {
        Some(entry) if is_kept(&entry) => return Ok(()),
        // If the table has an entry for the address, the kernel does not ask the hosts at once. So the entry is
        // removed.
        Some(_) => forget(link, address)?,
        None => {}
    }
    let mut entry = message(link, address);
    entry.header.flags = NeighbourFlags::Use;
    exchange(RouteNetlinkMessage::NewNeighbour(entry), NLM_F_CREATE)?;
    Ok(())
}

/// Returns the link-layer address of another host that has the address, according to the kernel's table of neighbours.
/// Returns `None` if no other host has answered. The caller must have called [`ask`] some time before. Also removes the
/// entry from the table, unless the entry was set by hand.
pub(crate) fn answer(link: &Link, address: IpAddr) -> io::Result<Option<String>> {
    let Some(entry) = get(link, address)? else {
        let text = format!("the kernel has dropped {address} from its table of neighbours");
        return Err(io::Error::other(text));
    };
    if !is_kept(&entry) {
        forget(link, address)?;
    }
    let by = entry.attributes.iter().find_map(|it| match it {
        NeighbourAttribute::LinkLayerAddress(by) => Some(by),
        _ => None,
    });
    let by = match entry.header.state {
        NeighbourState::Incomplete | NeighbourState::Failed | NeighbourState::None => None,
        NeighbourState::Noarp => {
            let text = format!("nobody can be asked for {address}: its neighbour entry is `noarp`");
            return Err(io::Error::other(text));
        }
        _ => by.filter(|by| **by != link.own),
    };
    Ok(by.map(|by| {
        let bytes: Vec<String> = by.iter().map(|byte| format!("{byte:02x}")).collect();
        bytes.join(":")
    }))
}

/// Whether an administrator or another program has set the entry by hand. Such an entry must stay.
fn is_kept(entry: &NeighbourMessage) -> bool {
    matches!(
        entry.header.state,
        NeighbourState::Permanent | NeighbourState::Noarp
    )
}

fn get(link: &Link, address: IpAddr) -> io::Result<Option<NeighbourMessage>> {
    let answers = exchange(RouteNetlinkMessage::GetNeighbour(message(link, address)), 0);
    match answers {
        Err(error) if is_errno(&error, Errno::NOENT) => Ok(None),
        Err(error) => Err(error),
        Ok(answers) => Ok(answers.into_iter().find_map(|it| match it {
            RouteNetlinkMessage::NewNeighbour(entry) => Some(entry),
            _ => None,
        })),
    }
}

fn forget(link: &Link, address: IpAddr) -> io::Result<()> {
    let entry = message(link, address);
    match exchange(RouteNetlinkMessage::DelNeighbour(entry), 0) {
        Err(error) if is_errno(&error, Errno::NOENT) => Ok(()),
        done => done.map(drop),
    }
}

fn message(link: &Link, address: IpAddr) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.ifindex = link.index;
    message.header.family = match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    };
    let to = NeighbourAddress::from(address);
    message.attributes.push(NeighbourAttribute::Destination(to));
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_usable_link_local_address_can_solicit() {
        let lines = "\
00000000000000000000000000000001 01 80 10 80       lo
fe800000000000000000000000000001 02 40 20 80     eth0
fe800000000000000000000000000001 03 40 20 c0     eth1
fd000000000000000000000000000001 04 40 00 80     eth2
";
        let can: Vec<bool> = ["lo", "eth0", "eth1", "eth2", "eth3"]
            .map(|it| can_solicit(lines, it))
            .into();
        assert_eq!(can, [false, true, false, false, false]);
    }
}
