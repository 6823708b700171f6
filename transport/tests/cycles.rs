//! Checks that ten thousand consecutive connections leak nothing. This is a separate test program,
//! because it measures the memory of the process.

#[allow(dead_code, reason = "the suite belongs to another test program")]
mod software;
#[allow(dead_code, reason = "the suite belongs to another test program")]
mod suite;

use riser_transport::loopback::FabricConfig;
use riser_transport::verbs::{CmEventKind, RdmaCm as _, SendOp, Verbs as _};

use software::Virtual;
use suite::world::{End, Wants, World, cm_event, connect_to, listen};

/// Returns the resident memory of this process in KiB, or `None` if the system does not report it.
fn resident() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * 4)
}

fn cycles(w: &mut Virtual, count: usize) {
    let wants = Wants {
        region: 4096,
        ..Wants::default()
    };
    for _ in 0..count {
        let (a, b) = connect_to(w, 4000, &wants, &wants);
        b.recv(w, 1, 0, 64);
        a.send(w, 1, SendOp::Send, 0, 64);
        assert!(a.completion(w).status.is_ok() && b.completion(w).status.is_ok());
        w.provider(End::A).disconnect(a.id).unwrap();
        for side in [&b, &a] {
            assert_eq!(cm_event(w, side.end).kind, CmEventKind::Disconnected);
        }
        for side in [a, b] {
            let p = w.provider(side.end);
            p.destroy_id(side.id).unwrap();
            p.destroy_qp(side.qp).unwrap();
            p.dereg_mr(side.mr.id).unwrap();
            p.destroy_cq(side.cq).unwrap();
            p.dealloc_pd(side.pd).unwrap();
        }
    }
}

#[test]
fn ten_thousand_connections_leave_nothing_behind() {
    let mut w = Virtual::new(FabricConfig::default());
    let _listener = listen(&mut w, End::B, 4000);
    cycles(&mut w, 2000);
    let before = resident();
    cycles(&mut w, 8000);
    if let (Some(before), Some(after)) = (before, resident()) {
        assert!(after < before + 4096, "{before} KiB became {after} KiB");
    }
}
