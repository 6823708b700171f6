//! Queue pair 1 of an initiator, used in tests to query the attributes of an I/O unit.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use riser_memory::{MemSlice, Memory};
use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::verbs::{
    Access, AhAttr, CqId, Gid, Mr, PdId, Provider, QKey, QpCap, QpId, QpInitAttr, QpType, RecvWr,
    SendOp, SendWr, Sge, UdDest, Verbs, WrId, make_gsi_ready,
};
use riser_transport::wire::dm::{Attribute, DmHeader, Method, Status};

use crate::mini::real;

/// Queue pair 1 on an initiator's device.
pub struct Gsi {
    pub dev: Roce,
    pd: PdId,
    cq: CqId,
    qp: QpId,
    memory: MemSlice,
    mr: Mr,
}

impl Gsi {
    pub fn open(addr: IpAddr) -> Self {
        let mut dev = Roce::open(&RoceConfig::new(addr)).unwrap();
        let pd = dev.alloc_pd().unwrap();
        let memory = Memory::new(4096).unwrap().whole();
        let mr = dev.reg_mr(pd, &memory, Access::LOCAL_WRITE).unwrap();
        let cq = dev.create_cq(16).unwrap();
        let qp = dev
            .create_qp(&QpInitAttr::new(pd, cq, QpType::Gsi, QpCap::new(4, 4)))
            .unwrap();
        make_gsi_ready(&mut dev, qp).unwrap();
        Self {
            dev,
            pd,
            cq,
            qp,
            memory,
            mr,
        }
    }

    fn sge(&self, at: u64, length: u32) -> [Sge; 1] {
        [Sge {
            addr: self.memory.addr() + at,
            length,
            lkey: self.mr.lkey,
        }]
    }

    /// Queries an attribute. As with any datagram, the request is sent again after a timeout.
    pub fn query(
        &mut self,
        server: IpAddr,
        method: Method,
        attribute: Attribute,
    ) -> (Status, Vec<u8>) {
        let header = DmHeader {
            method,
            status: Status::Success,
            transaction: 0x1234,
            attribute,
        };
        self.memory.write(0, &header.emit(&[]));
        for _ in 0..5 {
            self.post(server);
            let until = Instant::now() + Duration::from_secs(1);
            while Instant::now() < until {
                real(&mut self.dev);
                let mut done = Vec::new();
                self.dev.poll_cq(self.cq, 4, &mut done).unwrap();
                if done.iter().any(|c| c.opcode.is_recv()) {
                    let mut mad = vec![0; 256];
                    self.memory.read(1024 + 40, &mut mad);
                    let (response, data) = DmHeader::parse(&mad).unwrap();
                    assert_eq!(response.method, Method::GetResp);
                    assert_eq!(response.transaction, 0x1234);
                    assert_eq!(response.attribute, attribute);
                    return (response.status, data.to_vec());
                }
            }
        }
        panic!("no response");
    }

    fn post(&mut self, server: IpAddr) {
        let recv = RecvWr {
            wr_id: WrId(1),
            sges: &self.sge(1024, 296),
        };
        self.dev.post_recv(self.qp, &[recv]).unwrap();
        let ah = AhAttr::new(Gid::from(server));
        let ah = self.dev.create_ah(self.pd, ah).unwrap();
        let sge = self.sge(0, 256);
        let send = SendWr {
            ud: Some(UdDest {
                ah,
                qpn: 1,
                qkey: QKey::GSI,
            }),
            ..SendWr::new(2, SendOp::Send, &sge)
        };
        self.dev.post_send(self.qp, &[send]).unwrap();
        self.dev.progress(Instant::now());
        self.dev.destroy_ah(ah).unwrap();
    }
}
