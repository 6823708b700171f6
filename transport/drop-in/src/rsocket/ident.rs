//! An identifier of the connection manager with an event channel of its own.

use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::ptr;
use std::slice;

use riser_rdma_core_sys::bindings::*;

use crate::cm::*;
use crate::errno::Errno;

/// An identifier and its channel, whose descriptor never blocks.
pub(super) struct Ident {
    id: *mut rdma_cm_id,
    channel: *mut rdma_event_channel,
}

// SAFETY: the library's calls may be made in any thread.
unsafe impl Send for Ident {}

/// Something that has happened to an identifier.
pub(super) struct Event {
    pub(super) kind: rdma_cm_event_type,
    pub(super) status: c_int,
    /// The identifier, a new one for a connection request.
    pub(super) id: *mut rdma_cm_id,
    pub(super) data: Vec<u8>,
}

/// An event channel that never blocks.
fn channel() -> Result<*mut rdma_event_channel, Errno> {
    // SAFETY: the call may be made at any time; the channel is alive.
    unsafe {
        let channel = rdma_create_event_channel();
        if channel.is_null() {
            return Err(Errno::last());
        }
        never_block((*channel).fd);
        Ok(channel)
    }
}

/// Makes a descriptor of ours non-blocking.
pub(super) fn never_block(fd: c_int) {
    // SAFETY: the call changes nothing but the descriptor, which is alive.
    unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) };
}

impl Ident {
    /// Makes an identifier.
    ///
    /// # Errors
    /// Those of `rdma_create_event_channel(3)` and `rdma_create_id(3)`.
    pub(super) fn new(space: rdma_port_space) -> Result<Self, Errno> {
        let channel = channel()?;
        let mut id = ptr::null_mut();
        // SAFETY: the channel is alive, and there is a place for the identifier.
        unsafe {
            if rdma_create_id(channel, &raw mut id, ptr::null_mut(), space) != 0 {
                let errno = Errno::last();
                rdma_destroy_event_channel(channel);
                return Err(errno);
            }
        }
        Ok(Self { id, channel })
    }

    /// Takes over the identifier of a connection request, and gives it a channel of its own.
    ///
    /// # Errors
    /// Those of `rdma_create_event_channel(3)`; the identifier is then destroyed.
    pub(super) fn adopt(id: *mut rdma_cm_id) -> Result<Self, Errno> {
        let channel = channel().inspect_err(|_| {
            // SAFETY: the identifier is alive, and no one else has it.
            unsafe { rdma_destroy_id(id) };
        })?;
        let ident = Self { id, channel };
        // SAFETY: both are alive.
        unsafe { checked(rdma_migrate_id(id, channel)) }?;
        Ok(ident)
    }

    /// The program's pointer to it.
    pub(super) fn id(&self) -> *mut rdma_cm_id {
        self.id
    }

    /// The device, or null before there is one.
    pub(super) fn verbs(&self) -> *mut ibv_context {
        // SAFETY: the identifier is alive.
        unsafe { (*self.id).verbs }
    }

    /// Descriptor of the channel, which is readable while there is an event.
    pub(super) fn fd(&self) -> c_int {
        // SAFETY: the channel is alive.
        unsafe { (*self.channel).fd }
    }

    /// Next event, if there is one.
    pub(super) fn next_event(&self) -> Option<Event> {
        let mut event = ptr::null_mut();
        // SAFETY: the channel is alive; the event is until it is acknowledged.
        unsafe {
            if rdma_get_cm_event(self.channel, &raw mut event) != 0 {
                return None;
            }
            let param = (*event).param.conn;
            let data = match param.private_data.is_null() {
                true => Vec::new(),
                false => slice::from_raw_parts(
                    param.private_data.cast::<u8>(),
                    param.private_data_len.into(),
                )
                .to_vec(),
            };
            let ours = Event {
                kind: (*event).event,
                status: (*event).status,
                id: (*event).id,
                data,
            };
            rdma_ack_cm_event(event);
            Some(ours)
        }
    }

    /// Bytes of a packet on the way to the peer, or of a usual one before that is known.
    pub(super) fn mtu(&self) -> c_int {
        // SAFETY: the identifier is alive, and so is its route.
        let code = unsafe { (*self.id).route.path_rec.as_ref() }.map(|path| path.mtu);
        match code {
            Some(code @ 1..=5) => 128 << code,
            _ => 2048,
        }
    }

    /// Asks the peer for a connection, or accepts its request, with private data.
    ///
    /// # Errors
    /// Those of `rdma_connect(3)` and `rdma_accept(3)`.
    pub(super) fn connect(&self, data: &[u8], is_reply: bool) -> Result<(), Errno> {
        // SAFETY: all-zero bytes are valid for this plain C structure.
        let mut param: rdma_conn_param = unsafe { zeroed() };
        param.private_data = data.as_ptr().cast::<c_void>();
        param.private_data_len = data.len() as u8;
        param.flow_control = 1;
        // Without an end: a peer without a receive is one whose program is busy.
        param.rnr_retry_count = 7;
        param.retry_count = 7;
        // SAFETY: the identifier is alive, and so are the parameters.
        checked(unsafe {
            match is_reply {
                true => rdma_accept(self.id, &raw mut param),
                false => rdma_connect(self.id, &raw mut param),
            }
        })
    }

    /// Copies its address, or the peer's, to where a program wants it.
    ///
    /// # Errors
    /// `EINVAL` without a place.
    ///
    /// # Safety
    /// The pointers are null or the program's, with room for as many bytes as it says.
    pub(super) unsafe fn address(
        &self,
        is_peer: bool,
        place: *mut sockaddr,
        length: *mut socklen_t,
    ) -> Result<(), Errno> {
        if place.is_null() || length.is_null() {
            return Err(Errno::INVALID);
        }
        // SAFETY: the identifier is alive, and has room for an address of each family.
        unsafe {
            let addr = &raw const (*self.id).route.addr;
            let from: *const sockaddr = match is_peer {
                true => (&raw const (*addr).__bindgen_anon_2).cast(),
                false => (&raw const (*addr).__bindgen_anon_1).cast(),
            };
            let size = match c_int::from((*from).sa_family) {
                libc::AF_INET6 => size_of::<sockaddr_in6>(),
                _ => size_of::<sockaddr_in>(),
            };
            let room = (*length) as usize;
            ptr::copy_nonoverlapping(from.cast::<u8>(), place.cast::<u8>(), room.min(size));
            length.write(size as socklen_t);
        }
        Ok(())
    }
}

impl Drop for Ident {
    fn drop(&mut self) {
        // SAFETY: both are alive, and no one else has them.
        unsafe {
            rdma_destroy_id(self.id);
            rdma_destroy_event_channel(self.channel);
        }
    }
}

/// The outcome of a call that returns 0, or -1 with the reason in `errno`.
pub(super) fn checked(returned: c_int) -> Result<(), Errno> {
    match returned {
        0 => Ok(()),
        _ => Err(Errno::last()),
    }
}
