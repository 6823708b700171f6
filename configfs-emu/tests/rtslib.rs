//! `rtslib-fb` and `targetcli`, as they come with Debian, and a shell script, on the emulated tree.

mod rig;

use rig::{Rig, parse, script};
use serde_json::{Value, json};

/// All that was ever served.
fn ever(rig: &Rig, key: &str) -> Vec<Value> {
    let given = rig.given.lock().unwrap();
    given.iter().map(|d| d[key].clone()).collect()
}

#[test]
fn rtslib_configures_saves_and_restores() {
    let Some(rig) = Rig::new("configfs_rtslib") else {
        return;
    };
    rig.must(&format!(
        "/usr/bin/python3 {}",
        script("rtslib.py").display()
    ));
    let given = rig.last();
    let config = parse(&given).unwrap();
    assert_eq!(config.backends.len(), 3);
    let disk = &given["backends"]["fileio_0:disk"];
    assert_eq!(disk["serial"], "5a0e1b2c-0000-4000-8000-0123456789ab");
    assert_eq!(disk["naa"], "60014055a0e1b2c00004000800001234");
    assert_eq!(
        (&disk["product"], &disk["write_cache"]),
        (&json!("disk"), &json!("on"))
    );
    assert_eq!(
        given["targets"][0],
        json!({
            "name": "iqn.2003-01.org.linux-iscsi.host.x8664:sn.0123456789ab",
            "iqn": "iqn.2003-01.org.linux-iscsi.host.x8664:sn.0123456789ab",
            "portals": [
                { "protocol": "iscsi", "listen": "127.0.0.1:3260" },
                { "protocol": "iser", "listen": "127.0.0.1:3260" },
                { "protocol": "iscsi", "listen": "[::1]:3261" },
            ],
            "luns": { "0": "fileio_0:disk", "7": { "backend": "rd_mcp_1:ram", "read_only": true } },
            "access": [{
                "iqn": "iqn.2024-01.com.example:client",
                "luns": { "0": "fileio_0:disk", "3": { "backend": "rd_mcp_1:ram", "read_only": true } },
            }],
            "chap": {
                "users": [{ "name": "client", "secret": "a secret of some length" }],
                "mutual": { "name": "target", "secret": "another of some length" },
            },
        })
    );
    assert_eq!(
        given["targets"][1]["portals"][0]["listen"],
        "127.0.0.1:5555"
    );
    assert_eq!(given["discovery_chap"]["users"][0]["name"], "finder");
}

#[test]
fn targetcli_configures_saves_and_restores() {
    let Some(rig) = Rig::new("configfs_targetcli") else {
        return;
    };
    let tpg = "/iscsi/iqn.2026-01.com.example:t/tpg1";
    let said = rig.must(&format!(
        "targetcli /backstores/fileio create name=img file_or_dev=$FOLDER/img size=8M
         targetcli /iscsi create iqn.2026-01.com.example:t
         targetcli {tpg}/luns create /backstores/fileio/img
         targetcli {tpg}/acls create iqn.2026-01.com.example:i
         targetcli {tpg}/acls/iqn.2026-01.com.example:i set auth userid=joe \
             password=a-long-enough-secret
         targetcli {tpg} set attribute authentication=1
         targetcli {tpg}/portals delete 0.0.0.0 3260
         targetcli {tpg}/portals create 127.0.0.1 3260
         targetcli {tpg}/portals/127.0.0.1:3260 enable_iser boolean=true
         targetcli saveconfig
         targetcli ls
         targetcli clearconfig confirm=True
         targetcli restoreconfig
         targetcli ls"
    ));
    assert!(said.contains("[fileio/img ("), "{said}");
    assert!(said.contains("[1-way auth, Mapped LUNs: 1]"), "{said}");
    let target = rig.last()["targets"][0].clone();
    assert_eq!(
        target["access"],
        json!([{ "iqn": "iqn.2026-01.com.example:i" }])
    );
    assert_eq!(target["chap"]["users"][0]["name"], "joe");
    assert_eq!(
        target["portals"][1],
        json!({ "protocol": "iser", "listen": "127.0.0.1:3260" })
    );
    assert!(ever(&rig, "targets").contains(&json!([])), "it was cleared");
    rig.must("targetcli /backstores/fileio delete img\ntargetcli clearconfig confirm=True");
    assert_eq!(rig.last(), json!({ "backends": {}, "targets": [] }));
}

#[test]
fn a_shell_script_configures_srp_and_cleans_up() {
    let Some(rig) = Rig::new("configfs_script") else {
        return;
    };
    rig.must(&format!("bash {}", script("blktests.sh").display()));
    assert!(rig.folder.join("served").exists());
    let targets = ever(&rig, "targets");
    let served = targets.iter().find(|t| **t != json!([])).unwrap();
    assert_eq!(
        served[0],
        json!({
            "name": "0x00000000000000000000ffff7f000001",
            "portals": [{ "protocol": "srp", "listen": "127.0.0.1:5555" }],
            "luns": { "0": "fileio_0:vdev0", "1": "fileio_1:vdev1" },
            "access": [
                { "initiator": "0002c90300a1b2c3" },
                { "address": "10.0.0.2" },
                { "address": "fe80::5054:ff:fe12:3456" },
            ],
        })
    );
    assert_eq!(rig.last(), json!({ "backends": {}, "targets": [] }));
}
