//! Records assignments that another component knows and the ledger does not have, for example after the store was lost.

use super::super::ops::{AddressAssignment, Attachment, Now, PodRef};
use super::super::storage_fault::StorageFault;
use super::choose::describe;
use super::kv::KvMut;
use super::probes;
use super::record::{
    ADOPTED, ADOPTED_OLD, AddressRecord, AttachmentRecord, BlockRecord, BlockState,
};
use super::tables::{Read, Write};
use cadastre_core::{Addr, Cidr};

/// An assignment that another component, such as the container runtime, remembers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RememberedAttachment {
    /// Network, container and interface of the attachment
    pub attachment: Attachment,
    /// The addresses that the attachment uses, according to the component that remembers them
    pub addresses: Vec<Addr>,
    /// The pod of the attachment, if known
    pub pod: Option<PodRef>,
    /// Path of the attachment's network namespace; empty if unknown
    pub netns: String,
    /// When the addresses were assigned, in milliseconds of Unix time
    pub since_ms: i64,
    /// ID of the boot in which the attachment was set up; empty for the running boot
    pub boot: String,
    /// Whether the same pod has a newer attachment with the same network and interface, which replaces this one
    pub superseded: bool,
}

pub(crate) fn adopt(
    kv: &mut dyn KvMut,
    remembered: &[RememberedAttachment],
    now: &Now,
) -> Result<Vec<RememberedAttachment>, StorageFault> {
    let mut lost = Vec::new();
    for it in remembered {
        let boot = if it.boot.is_empty() {
            &now.boot
        } else {
            &it.boot
        };
        let mut record = kv
            .record(&it.attachment)?
            .unwrap_or_else(|| AttachmentRecord {
                attachment: it.attachment.clone(),
                given: AddressAssignment::default(),
                netns: it.netns.clone(),
                pod: it.pod.clone(),
                since_ms: it.since_ms,
                boot: boot.clone(),
                order: if it.superseded { ADOPTED_OLD } else { ADOPTED },
            });
        let mut skipped = Vec::new();
        for addr in &it.addresses {
            match kv.address(*addr)? {
                Some(AddressRecord::Used { by, .. }) if by == it.attachment => {}
                Some(_) => skipped.push(*addr),
                None => {
                    let (cidr, block) = block_of(kv, *addr)?;
                    let usable = block.usable(cidr, kv.pool(&block.pool)?.as_ref());
                    let given = describe(cidr, &block.pool, &usable, *addr);
                    let by = it.attachment.clone();
                    kv.put_address(*addr, &AddressRecord::Used { by, block: cidr })?;
                    probes::end(kv, *addr)?;
                    record.given.addresses.push(given);
                }
            }
        }
        if !skipped.is_empty() {
            lost.push(RememberedAttachment {
                addresses: skipped,
                ..it.clone()
            });
        }
        if !record.given.addresses.is_empty() {
            record.given.addresses.sort_by_key(|given| given.address);
            kv.put_record(&record)?;
        }
    }
    Ok(lost)
}

/// Returns the block that contains an address. If no block contains the address, creates a block of this one address,
/// which assigns no other address.
fn block_of(kv: &mut dyn KvMut, addr: Addr) -> Result<(Cidr, BlockRecord), StorageFault> {
    if let Some(found) = kv.block_around(addr)? {
        return Ok(found);
    }
    let cidr = Cidr::host(addr);
    let block = BlockRecord {
        uid: String::new(),
        pool: String::new(),
        state: BlockState::Unlisted,
        borrowed: false,
        reserved: Vec::new(),
        on_request: Vec::new(),
    };
    kv.put_block(cidr, &block)?;
    Ok((cidr, block))
}
