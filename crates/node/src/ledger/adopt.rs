//! Records assignments that another component knows, in a ledger that does not have them.

use super::super::ops::{AddressAssignment, AssignedAddress, Attachment, Now, PodRef};
use super::super::storage_fault::StorageFault;
use super::kv::KvMut;
use super::record::{
    ADOPTED, ADOPTED_OLD, AddressRecord, BlockRecord, BlockState, StoredAttachment,
};
use super::tables::{Read, Write};
use cadastre_core::usable::usable;
use cadastre_core::{Addr, Cidr};

/// An assignment that another component remembers, for example the container runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RememberedAttachment {
    /// The attachment that has the addresses
    pub attachment: Attachment,
    /// The addresses of the attachment
    pub addresses: Vec<Addr>,
    /// The pod of the attachment, if known
    pub pod: Option<PodRef>,
    /// Path of the attachment's network namespace; empty if unknown
    pub netns: String,
    /// When the addresses were assigned, in milliseconds of Unix time
    pub since_ms: i64,
    /// ID of the boot in which the attachment was set up; empty for the running boot
    pub boot: String,
    /// Whether the same pod has a newer attachment with the same network and interface
    pub superseded: bool,
}

pub(crate) fn adopt(
    kv: &mut dyn KvMut,
    known: &[RememberedAttachment],
    now: &Now,
) -> Result<Vec<RememberedAttachment>, StorageFault> {
    let mut lost = Vec::new();
    for it in known {
        let mut record = kv
            .record(&it.attachment)?
            .unwrap_or_else(|| StoredAttachment {
                given: AddressAssignment::default(),
                netns: it.netns.clone(),
                pod: it.pod.clone(),
                since_ms: it.since_ms,
                boot: if it.boot.is_empty() {
                    now.boot.clone()
                } else {
                    it.boot.clone()
                },
                order: if it.superseded { ADOPTED_OLD } else { ADOPTED },
            });
        let mut taken = Vec::new();
        for addr in &it.addresses {
            match kv.address(*addr)? {
                Some(AddressRecord::Used { by, .. }) if by == it.attachment => continue,
                Some(_) => {
                    taken.push(*addr);
                    continue;
                }
                None => {}
            }
            let given = describe(kv, *addr)?;
            let (by, block) = (it.attachment.clone(), given.block);
            kv.put_address(*addr, &AddressRecord::Used { by, block })?;
            record.given.addresses.push(given);
        }
        if !taken.is_empty() {
            lost.push(RememberedAttachment {
                addresses: taken,
                ..it.clone()
            });
        }
        if !record.given.addresses.is_empty() {
            record.given.addresses.sort_by_key(|given| given.address);
            kv.put_record(&it.attachment, &record)?;
        }
    }
    Ok(lost)
}

/// Returns the description of an address for its record. If no block contains the address, creates a block of this
/// one address, from which no other address is assigned.
fn describe(kv: &mut dyn KvMut, addr: Addr) -> Result<AssignedAddress, StorageFault> {
    let (cidr, pool) = if let Some((cidr, block)) = kv.block_around(addr)? {
        (cidr, block.pool)
    } else {
        let block = BlockRecord {
            uid: String::new(),
            pool: String::new(),
            state: BlockState::Withdrawn,
            reserved: Vec::new(),
            on_request: Vec::new(),
        };
        let cidr = Cidr::host(addr);
        kv.put_block(cidr, &block)?;
        (cidr, block.pool)
    };
    let usable = usable(cidr, kv.pool(&pool)?.as_ref());
    Ok(AssignedAddress {
        address: addr,
        prefix: usable.prefix,
        gateway: usable.gateway,
        pool,
        block: cidr,
    })
}
