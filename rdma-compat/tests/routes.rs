//! Routes of `rdma_getaddrinfo`, from a subnet administrator.

#![allow(unsafe_code, reason = "a C interface is called")]
#![allow(unused_unsafe, reason = "calls have blocks of their own")]

mod library;

use std::ffi::{CStr, c_char, c_int};
use std::mem::zeroed;
use std::net::IpAddr;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use library::*;
use riser_fabric::sa::administrator::{Administrator, AdministratorConfig};
use riser_rdma_core_sys::bindings::*;
use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::verbs::{Mtu, Provider as _};
use riser_transport::wire::mad::MadClass;

const SERVER: &CStr = c"127.0.59.2";

/// A subnet administrator at 127.0.59.9, which counts the requests that it receives.
struct Fabric {
    requests: Arc<AtomicU32>,
    is_over: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Fabric {
    fn start() -> Self {
        let addr = IpAddr::from([127, 0, 59, 9]);
        let (requests, is_over) = (Arc::<AtomicU32>::default(), Arc::<AtomicBool>::default());
        let mut nic = Roce::open(&RoceConfig::new(addr)).unwrap();
        for class in [MadClass::SubnetAdm, MadClass::Performance] {
            nic.register_agent(class).unwrap();
        }
        let thread = thread::spawn({
            let (requests, is_over) = (Arc::clone(&requests), Arc::clone(&is_over));
            move || {
                let config = AdministratorConfig::new(addr, Mtu::Mtu1024, [7; 16]);
                let mut administrator = Administrator::new(config);
                while !is_over.load(Ordering::Relaxed) {
                    let now = Instant::now();
                    nic.progress(now);
                    administrator.handle_timeout(now);
                    while let Some((from, mad)) = nic.poll_mad() {
                        requests.fetch_add(1, Ordering::Relaxed);
                        administrator.handle_mad(now, from.into(), &mad);
                    }
                    while let Some((to, mad)) = administrator.poll_transmit(now) {
                        nic.send_mad(to.ip(), &mad).unwrap();
                    }
                    thread::sleep(Duration::from_millis(1));
                }
            }
        });
        Self {
            requests,
            is_over,
            thread: Some(thread),
        }
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = self.thread.take().unwrap().join();
    }
}

fn address_info(flags: u32) -> *mut rdma_addrinfo {
    // SAFETY: all zeroes is valid.
    let mut hints: rdma_addrinfo = unsafe { zeroed() };
    hints.ai_flags = flags as c_int;
    hints.ai_port_space = RDMA_PS_TCP as c_int;
    let mut info = ptr::null_mut();
    let result = call!(rdma_getaddrinfo(SERVER.as_ptr() => *const c_char,
        c"7201".as_ptr() => *const c_char, &raw const hints => *const rdma_addrinfo,
        &raw mut info => *mut *mut rdma_addrinfo) -> c_int);
    assert_eq!(result, 0);
    info
}

fn free(info: *mut rdma_addrinfo) {
    call!(rdma_freeaddrinfo(info => *mut rdma_addrinfo));
}

fn create_ep(info: *mut rdma_addrinfo) -> *mut rdma_cm_id {
    let mut id = ptr::null_mut();
    let result = call!(rdma_create_ep(&raw mut id => *mut *mut rdma_cm_id,
        info => *mut rdma_addrinfo, ptr::null_mut() => *mut ibv_pd,
        ptr::null_mut() => *mut ibv_qp_init_attr) -> c_int);
    assert_eq!(result, 0, "{}", errno());
    id
}

/// A single test, because the library reads the environment once.
#[test]
fn route_is_queried_unless_disabled() {
    // SAFETY: no other thread reads the environment.
    unsafe {
        std::env::set_var("RISER_TEST_DEVICES", "riser0=127.0.59.1,riser1=127.0.59.2");
        std::env::set_var("RISER_SA", "127.0.59.9");
    }
    let fabric = Fabric::start();
    let requests = || fabric.requests.load(Ordering::Relaxed);

    // Neither of these has a route.
    for flags in [RAI_NOROUTE, RAI_PASSIVE] {
        let info = address_info(flags);
        // SAFETY: it is alive.
        unsafe { assert!((*info).ai_route.is_null() && (*info).ai_route_len == 0) };
        free(info);
    }
    assert_eq!(requests(), 0);

    let info = address_info(0);
    // SAFETY: it is alive, and the route has this type and length.
    unsafe {
        assert_eq!((*info).ai_route_len, size_of::<ibv_path_data>());
        let data = &*(*info).ai_route.cast::<ibv_path_data>();
        let wanted = IBV_PATH_FLAG_GMP | IBV_PATH_FLAG_PRIMARY | IBV_PATH_FLAG_BIDIRECTIONAL;
        assert_eq!(data.flags, wanted);
        assert_eq!(data.path.dgid.raw[10..], [0xff, 0xff, 127, 0, 59, 2]);
        assert_eq!(data.path.sgid.raw[10..12], [0xff, 0xff]);
        assert_eq!(data.path.mtu & 0x3f, IBV_MTU_1024 as u8);
        assert_eq!(
            CStr::from_ptr((*info).ai_dst_canonname),
            SERVER,
            "the canonical name of a number"
        );
        assert!((*info).ai_src_canonname.is_null());
    }
    assert!(requests() > 0);

    // An endpoint uses the route, whose MTU is below the interface's.
    let id = create_ep(info);
    // SAFETY: the identifier is alive, and has a path.
    unsafe {
        assert_eq!((*id).route.num_paths, 1);
        let path = &*(*id).route.path_rec;
        assert_eq!(path.mtu, IBV_MTU_1024 as u8);
    }
    call!(rdma_destroy_ep(id => *mut rdma_cm_id));
    free(info);

    // Without a response, the address is returned without a route.
    drop(fabric);
    let before = Instant::now();
    let info = address_info(0);
    assert!(before.elapsed() < Duration::from_secs(4));
    // SAFETY: it is alive.
    unsafe { assert!((*info).ai_route.is_null() && !(*info).ai_dst_addr.is_null()) };
    free(info);
    // The failure is remembered: further calls do not wait.
    let before = Instant::now();
    for _ in 0..5 {
        free(address_info(0));
    }
    assert!(before.elapsed() < Duration::from_secs(1));
}
