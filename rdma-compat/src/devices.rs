//! The list of devices.
//!
//! The devices are specified by the environment: `RISER_DEVICES` contains a list of `NAME=ADDRESS`,
//! separated by commas. An element without a name is an additional address of the preceding device,
//! which has a GID for each address. The variable is set by `riser run`. If it is not set, there is
//! one device, `riser0` at 127.0.0.1. `RISER_SA` is the address of the fabric's subnet
//! administrator. `RISER_LINK_LAYER=infiniband` makes ports report InfiniBand and a LID, for
//! programs that query paths and don't support other link layers, such as `ibacm`.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::io::{IsTerminal as _, Stderr, Write};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::AtomicPtr;
use std::{env, ptr};

use riser_rdma_core_sys::bindings::*;
use riser_transport::nic::device_guid;
use riser_transport::roce::RoceFaults;
use tracing::{error, warn};
use tracing_subscriber::EnvFilter;

use crate::cancel::Uncancellable;
use crate::engine::Config;
use crate::errno::{Errno, pointer};
use crate::fork;
use crate::lock::{LISTING, unpoisoned};

/// A device that can be opened. It exists until the process exits, because programs keep the
/// pointer.
#[repr(C)]
pub(crate) struct Device {
    c: ibv_device,
    pub(crate) config: Config,
    pub(crate) index: usize,
    /// Its shared context for identifiers ([`crate::cm::Shared`]), or null if it was not created
    /// yet. It has no lock, because the lock could be held during a fork, and would then never be
    /// released in the child.
    pub(crate) shared: AtomicPtr<c_void>,
}

// SAFETY: a device is immutable, except for the shared context, which is atomic.
unsafe impl Sync for Device {}
// SAFETY: as above.
unsafe impl Send for Device {}

impl Device {
    /// Returns the device for a program's pointer.
    ///
    /// # Errors
    /// Returns `EINVAL` if the pointer is invalid.
    pub(crate) fn get(device: *mut ibv_device) -> Result<&'static Self, Errno> {
        let known = devices().iter().find(|d| ptr::eq(&raw const d.c, device));
        known.ok_or(Errno::INVALID)
    }

    pub(crate) fn handle(&'static self) -> *mut ibv_device {
        (&raw const self.c).cast_mut()
    }

    /// Returns the GUID of the device.
    pub(crate) fn guid(&self) -> u64 {
        device_guid(self.config.addr)
    }
}

/// Returns all devices, in the order of the environment variable.
pub(crate) fn devices() -> &'static [Device] {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    if let Some(devices) = DEVICES.get() {
        return devices;
    }
    let _uncancellable = Uncancellable::new();
    fork::install();
    let _listing = unpoisoned(LISTING.lock());
    DEVICES.get_or_init(|| {
        start_log();
        let value = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
        let (listed, faults) = (value("RISER_DEVICES"), value("RISER_INJECT"));
        // If invalid faults were ignored, a test could pass although it should fail, so we return
        // no devices in this case too.
        let (sa, layer) = (value("RISER_SA"), value("RISER_LINK_LAYER"));
        let configs = read_link_layer(layer.as_deref()).and_then(|layer| {
            LINK_LAYER.get_or_init(|| layer);
            let administrator = read_administrator(sa.as_deref())?;
            let mut configs = read(listed.as_deref(), faults.as_deref())?;
            for config in &mut configs {
                config.administrator = administrator;
            }
            Ok(configs)
        });
        let configs = configs.unwrap_or_else(|reason| {
            error!("cannot configure devices: {reason}");
            Vec::new()
        });
        let capture = value("RISER_PCAP");
        let devices = configs.into_iter().enumerate();
        devices
            .map(|(index, mut config)| {
                config.capture = capture.as_deref().map(|file| {
                    let mut file = file.to_owned();
                    if index > 0 {
                        file.push(format!(".{}", config.name));
                    }
                    PathBuf::from(file)
                });
                make(index, config)
            })
            .collect()
    })
}

/// Link layer reported by ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkLayer {
    Ethernet,
    InfiniBand,
}

static LINK_LAYER: OnceLock<LinkLayer> = OnceLock::new();

/// Returns the link layer reported by ports.
pub(crate) fn link_layer() -> LinkLayer {
    *LINK_LAYER.get().unwrap_or(&LinkLayer::Ethernet)
}

/// Returns the LID of ports, which is also used for the administrator. RoCE has no LIDs, but
/// programs that require InfiniBand ports require a LID too.
pub(crate) fn lid() -> u16 {
    match link_layer() {
        LinkLayer::Ethernet => 0,
        LinkLayer::InfiniBand => 1,
    }
}

fn read_link_layer(layer: Option<&OsStr>) -> Result<LinkLayer, String> {
    let Some(layer) = layer else {
        return Ok(LinkLayer::Ethernet);
    };
    match layer.as_encoded_bytes() {
        b"ethernet" => Ok(LinkLayer::Ethernet),
        b"infiniband" => Ok(LinkLayer::InfiniBand),
        _ => Err(format!(
            "RISER_LINK_LAYER: unknown link layer {layer:?}: expected ethernet or infiniband"
        )),
    }
}

fn read_administrator(addr: Option<&OsStr>) -> Result<Option<IpAddr>, String> {
    let Some(addr) = addr else {
        return Ok(None);
    };
    let parsed = addr.to_str().and_then(|addr| addr.parse().ok());
    let wrong = || format!("RISER_SA: invalid address {addr:?}");
    parsed.map(Some).ok_or_else(wrong)
}

/// Standard error, for a thread that must not be cancelled while it is logging.
struct Log {
    stderr: Stderr,
    _uncancellable: Uncancellable,
}

impl Default for Log {
    fn default() -> Self {
        Self {
            stderr: std::io::stderr(),
            _uncancellable: Uncancellable::new(),
        }
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.stderr.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.stderr.flush()
    }
}

fn start_log() {
    let chosen = env::var("RISER_LOG").unwrap_or_else(|_| "warn".to_owned());
    let filter = EnvFilter::try_new(&chosen);
    let wrong = filter.as_ref().err().map(ToString::to_string);
    // This fails if another part of the process has already installed a subscriber.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter.unwrap_or_else(|_| EnvFilter::new("warn")))
        .with_writer(Log::default)
        .with_ansi(std::io::stderr().is_terminal())
        // Otherwise it would report failed writes to standard error, which fails too, and panic.
        .log_internal_errors(false)
        .try_init();
    if let Some(wrong) = wrong {
        warn!("RISER_LOG: invalid filter {chosen:?}: {wrong}");
    }
}

/// Reads the devices, and the faults of their wires, from environment variables.
fn read(listed: Option<&OsStr>, faults: Option<&OsStr>) -> Result<Vec<Config>, String> {
    let text = |name: &str, value: &OsStr| {
        let text = value.to_str().map(str::to_owned);
        text.ok_or_else(|| format!("{name}: invalid UTF-8 in {value:?}"))
    };
    let listed = listed.map_or(Ok("riser0=127.0.0.1".to_owned()), |listed| {
        text("RISER_DEVICES", listed)
    })?;
    let mut configs = parse(&listed).map_err(|reason| format!("RISER_DEVICES: {reason}"))?;
    if let Some(faults) = faults {
        let faults: RoceFaults = text("RISER_INJECT", faults)?
            .parse()
            .map_err(|reason| format!("RISER_INJECT: {reason}"))?;
        for config in &mut configs {
            config.faults = faults;
        }
    }
    Ok(configs)
}

fn parse(text: &str) -> Result<Vec<Config>, String> {
    let mut configs: Vec<Config> = Vec::new();
    for part in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
        let (name, addr) = match (part.split_once('='), configs.last()) {
            (Some((name, addr)), _) => (Some(name), addr),
            (None, Some(_)) => (None, part),
            (None, None) => return Err(format!("invalid device {part:?}: expected NAME=ADDRESS")),
        };
        let addr: IpAddr = addr
            .parse()
            .map_err(|_| format!("invalid address {addr:?}"))?;
        if configs.iter().any(|c| c.addrs().any(|other| other == addr)) {
            return Err(format!("{part:?}: duplicate address"));
        }
        let Some(name) = name else {
            if let Some(device) = configs.last_mut() {
                device.other_addrs.push(addr);
            }
            continue;
        };
        if name.is_empty() || name.len() > 63 || name.contains('/') {
            return Err(format!("invalid device name {name:?}"));
        }
        if configs.iter().any(|c| c.name == name) {
            return Err(format!("{part:?}: duplicate name"));
        }
        configs.push(Config {
            name: name.to_owned(),
            addr,
            other_addrs: Vec::new(),
            administrator: None,
            faults: RoceFaults::default(),
            capture: None,
        });
    }
    Ok(configs)
}

fn make(index: usize, config: Config) -> Device {
    fn copy<const N: usize>(text: &str) -> [c_char; N] {
        let mut all = [0; N];
        for (to, from) in all.iter_mut().zip(text.bytes().take(N - 1)) {
            *to = from as c_char;
        }
        all
    }
    let name = &config.name;
    Device {
        c: ibv_device {
            _ops: _ibv_device_ops {
                _dummy1: None,
                _dummy2: None,
            },
            node_type: IBV_NODE_CA,
            transport_type: IBV_TRANSPORT_IB,
            name: copy(name),
            dev_name: copy(&format!("uverbs{index}")),
            // Programs read more information about a device there, but these directories don't
            // exist for a software device.
            dev_path: copy(&format!("/sys/class/infiniband_verbs/uverbs{index}")),
            ibdev_path: copy(&format!("/sys/class/infiniband/{name}")),
        },
        config,
        index,
        shared: AtomicPtr::default(),
    }
}

/// `ibv_get_device_list(3)`.
pub(crate) unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let devices = devices();
    // SAFETY: this is the size of the pointers plus a null pointer.
    let list = unsafe { libc::calloc(devices.len() + 1, size_of::<*mut ibv_device>()) };
    let list = list.cast::<*mut ibv_device>();
    if list.is_null() {
        return pointer(Err(Errno::NO_MEMORY));
    }
    for (i, device) in devices.iter().enumerate() {
        // SAFETY: the list has enough space for all devices.
        unsafe { list.add(i).write(device.handle()) };
    }
    if !count.is_null() {
        // SAFETY: the program provides memory for the number.
        unsafe { count.write(devices.len() as c_int) };
    }
    list
}

/// `ibv_free_device_list(3)`.
pub(crate) unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: the list was allocated by `calloc`.
    unsafe { libc::free(list.cast()) };
}

/// `ibv_get_device_name(3)`.
pub(crate) unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    match Device::get(device) {
        Ok(device) => device.c.name.as_ptr(),
        Err(errno) => pointer::<c_char>(Err(errno)),
    }
}

/// `ibv_get_device_guid(3)`: returns the GUID in network byte order.
pub(crate) unsafe extern "C" fn ibv_get_device_guid(device: *mut ibv_device) -> __be64 {
    Device::get(device).map_or(0, |d| d.guid().to_be())
}

/// `ibv_get_device_index(3)`.
pub(crate) unsafe extern "C" fn ibv_get_device_index(device: *mut ibv_device) -> c_int {
    Device::get(device).map_or(-1, |d| d.index as c_int)
}

/// Returns the path where sysfs is mounted.
pub(crate) unsafe extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    const PATH: &CStr = c"/sys";
    PATH.as_ptr()
}

/// Reads a file in a device's sysfs directory, which doesn't exist for a software device.
pub(crate) unsafe extern "C" fn ibv_read_sysfs_file(
    _directory: *const c_char,
    _file: *const c_char,
    _text: *mut c_char,
    _size: usize,
) -> c_int {
    Errno(libc::ENOENT).set();
    -1
}

/// `ibv_fork_init(3)`. We don't pin any memory of a program, so copy-on-write has no effect on the
/// device.
pub(crate) unsafe extern "C" fn ibv_fork_init() -> c_int {
    0
}

/// Returns whether a process can fork without any preparation, which is always the case.
pub(crate) unsafe extern "C" fn ibv_is_fork_initialized() -> ibv_fork_status {
    IBV_FORK_UNNEEDED
}

/// Marks a range that is not needed in a child. See [`ibv_fork_init`].
pub(crate) unsafe extern "C" fn ibv_dontfork_range(
    _base: *mut libc::c_void,
    _size: usize,
) -> c_int {
    0
}

/// Marks a range that is needed in a child again. See [`ibv_fork_init`].
pub(crate) unsafe extern "C" fn ibv_dofork_range(_base: *mut libc::c_void, _size: usize) -> c_int {
    0
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt as _;

    use super::*;

    #[test]
    fn device_list_is_parsed() {
        let configs = parse("a=127.0.0.1, b=::1").unwrap();
        let names: Vec<_> = configs
            .iter()
            .map(|c| (&c.name[..], c.addr.to_string()))
            .collect();
        assert_eq!(
            names,
            [("a", "127.0.0.1".to_owned()), ("b", "::1".to_owned())]
        );
        let configs = parse("a=127.0.0.1,127.0.1.1,fd00::1,b=127.0.0.2").unwrap();
        let addrs: Vec<_> = configs.iter().map(|c| c.addrs().count()).collect();
        assert_eq!(addrs, [3, 1]);
        for bad in [
            "a",
            "::1",
            "a=b",
            "=::1",
            "a=::1,a=::2",
            "a=::1,b=::1",
            "a/b=::1",
            "a=::1,::1",
            "a=::1,b=::2,::1",
            "a=::1,b",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn invalid_environment_is_reported() {
        let wrong = OsStr::from_bytes(b"a=\xff");
        let why = |listed, faults| read(listed, faults).unwrap_err();
        assert!(why(Some(wrong), None).starts_with("RISER_DEVICES: "));
        assert!(why(Some(OsStr::new("a")), None).starts_with("RISER_DEVICES: "));
        assert!(why(None, Some(wrong)).starts_with("RISER_INJECT: "));
        assert!(why(None, Some(OsStr::new("lost=1"))).starts_with("RISER_INJECT: "));
        let configs = read(None, Some(OsStr::new("loss=1"))).unwrap();
        assert_eq!(configs[0].name, "riser0");
        assert!(configs[0].faults.transmit.is_some());
    }
}
