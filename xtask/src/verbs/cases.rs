//! The cases: which programs are run, and what they must say.
//!
//! A command is words between spaces. In it `{server}` and `{client}` are the addresses of the two
//! sides, `{port}` a port that no other case uses, `{dir}` a folder of the case's own, and `{programs}`
//! the folder of our programs.

/// Time of a case unless it says otherwise, in seconds.
const SECONDS: u64 = 30;

/// Sign that a server takes clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ready {
    /// It listens at TCP port `{port}`.
    Port,
    /// It has a UDP socket at its address and `{port}`.
    Datagrams,
    /// Its device has its UDP socket. What follows until it listens takes no system call that could
    /// be seen.
    Device,
    /// It has said this.
    Says(&'static str),
}

/// Ways in which a server ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// By itself, with success.
    Itself,
    /// When it is asked to, by SIGTERM.
    Asked,
}

/// Where a case runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// At addresses of loopback.
    Loopback,
    /// In namespaces with an interface and `/dev/infiniband` ([`super::namespace`]), for one client.
    Network,
}

/// One case.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) group: &'static str,
    pub(super) name: String,
    /// The command that is started first.
    pub(super) server: Option<String>,
    pub(super) ready: Ready,
    pub(super) end: End,
    /// The command that is started then.
    pub(super) client: Option<String>,
    /// Number of clients that run at once, each at an address of its own. One starts a moment after
    /// the other: `rping -P` takes one request at a time, and loses those that come meanwhile.
    pub(super) clients: usize,
    /// Words in the output of each client, or of the server where there is none.
    pub(super) says: Vec<&'static str>,
    /// The client must refuse to do it, by an exit status that is not 0.
    pub(super) is_refused: bool,
    /// Faults of both sides' wire.
    pub(super) faults: Option<&'static str>,
    /// Configuration of `riserd`, which is in `{dir}/riserd.yaml`.
    pub(super) config: Option<&'static str>,
    /// Both sides' sockets are rsockets.
    pub(super) sockets: bool,
    /// Variable of the environment of both sides, with its value.
    pub(super) variable: Option<(&'static str, &'static str)>,
    /// Two files in `{dir}` that are the same in the end. The first one is there before.
    pub(super) is_copy: bool,
    pub(super) place: Place,
    /// A program of ours, by its path in the sources, that is compiled for MPI as `{dir}/program`.
    pub(super) source: Option<&'static str>,
    /// Longest time.
    pub(super) seconds: u64,
    /// Its programs wait for messages that may be lost, so it has a second attempt.
    pub(super) may_lose: bool,
}

impl Case {
    /// Name with its group.
    pub(super) fn path(&self) -> String {
        format!("{}/{}", self.group, self.name)
    }

    pub(super) fn alone(
        group: &'static str,
        name: &str,
        command: &str,
        says: &[&'static str],
    ) -> Self {
        Self {
            group,
            name: name.to_owned(),
            server: None,
            ready: Ready::Device,
            end: End::Itself,
            client: Some(command.to_owned()),
            clients: 1,
            says: says.to_vec(),
            is_refused: false,
            faults: None,
            config: None,
            sockets: false,
            variable: None,
            is_copy: false,
            place: Place::Loopback,
            source: None,
            seconds: SECONDS,
            may_lose: false,
        }
    }

    pub(super) fn pair(
        group: &'static str,
        name: &str,
        [server, client]: [&str; 2],
        says: &[&'static str],
    ) -> Self {
        Self {
            server: Some(server.to_owned()),
            ..Self::alone(group, name, client, says)
        }
    }

    pub(super) fn ready(self, ready: Ready) -> Self {
        Self { ready, ..self }
    }

    /// The server serves until it is asked to end.
    pub(super) fn asked(self) -> Self {
        Self {
            end: End::Asked,
            ..self
        }
    }

    fn clients(self, clients: usize) -> Self {
        Self { clients, ..self }
    }

    /// It runs where there is a network interface.
    pub(super) fn on_network(self) -> Self {
        Self {
            place: Place::Network,
            ..self
        }
    }

    /// Programs that it starts, without `env` and what that sets.
    pub(super) fn programs(&self) -> impl Iterator<Item = &str> {
        let commands = [&self.server, &self.client].into_iter().flatten();
        commands.filter_map(|command| {
            let mut words = command.split(' ');
            words.find(|word| *word != "env" && !word.contains('='))
        })
    }

    fn refused(self) -> Self {
        Self {
            is_refused: true,
            ..self
        }
    }

    fn faults(self, faults: &'static str) -> Self {
        Self {
            faults: Some(faults),
            ..self
        }
    }

    pub(super) fn seconds(self, seconds: u64) -> Self {
        Self { seconds, ..self }
    }
}

/// Index of the GID that programs are told to use: that of RoCEv2 with the device's address.
const GID: &str = "0";

/// The cases of rdma-core's programs, perftest and ours, in the order of their run.
pub(super) fn all() -> Vec<Case> {
    let mut cases = info();
    cases.extend(management());
    cases.extend(pingpong());
    cases.extend(rdmacm());
    cases.extend(rsockets());
    cases.extend(sockets());
    cases.extend(perftest());
    cases.extend(disks());
    cases.extend(misuse());
    cases
}

fn info() -> Vec<Case> {
    let watch = Case {
        server: Some("ibv_asyncwatch -d riser0".to_owned()),
        client: None,
        ready: Ready::Says("async event"),
        end: End::Asked,
        ..Case::alone("info", "ibv_asyncwatch", "", &["riser0"])
    };
    vec![
        Case::alone("info", "ibv_devices", "ibv_devices", &["riser0"]),
        Case::alone("info", "ibv_devinfo", "ibv_devinfo", &["PORT_ACTIVE"]),
        Case::alone(
            "info",
            "ibv_devinfo -v",
            "ibv_devinfo -v -d riser0",
            &["link_layer:\t\tEthernet", "max_mr_size", "GID["],
        ),
        watch,
    ]
}

/// Programs that ask the device itself by management datagrams.
fn management() -> Vec<Case> {
    const RUNS: &[(&str, &[&str])] = &[
        ("ibstat", &["CA 'riser0'", "State: Active", "Ethernet"]),
        ("perfquery", &["PortRcvPkts:", "PortXmitData:"]),
        ("perfquery -x", &["PortMulticastRcvPkts:"]),
        ("perfquery -R", &[]),
        ("smpquery -D nodeinfo 0", &["Channel Adapter", "NumPorts:"]),
        ("smpquery -D portinfo 0", &["LinkState:", "Active"]),
        ("smpquery -D nodedesc 0", &["roce-"]),
    ];
    let case = |&(command, says): &(&str, &[&'static str])| {
        Case::alone("management", command, command, says)
    };
    let switch = Case::alone(
        "management",
        "smpquery -D switchinfo 0",
        "smpquery -D switchinfo 0",
        &[],
    );
    let cases = RUNS.iter().map(case).chain([switch.refused()]);
    cases.chain(administration()).collect()
}

/// Programs that ask subnet administration: that of their own process, and that of `riser-sa`.
fn administration() -> Vec<Case> {
    const SERVER: &str = "{programs}/riser-sa --no-netlink --addr {server}";
    let ask = |name: &str, command: &str, says: &[&'static str]| {
        let client = format!("env RISER_LINK_LAYER=infiniband RISER_SA={{server}} {command}");
        Case {
            end: End::Asked,
            ..Case::pair("management", name, [SERVER, &client], says)
        }
    };
    // Groups of netlink take a right that programs have in namespaces.
    let network = |name: &str, words: &str, says: &[&'static str]| {
        let command = format!("python3 {{dir}}/{IBACM} {words}");
        Case {
            place: Place::Network,
            ..Case::alone("management", name, &command, says)
        }
    };
    vec![
        Case {
            variable: Some(("RISER_LINK_LAYER", "infiniband")),
            ..Case::alone(
                "management",
                "saquery NR",
                "saquery NR",
                &["NodeRecord dump"],
            )
        },
        ask("riser-sa, saquery NR", "saquery NR", &["NodeRecord dump"]),
        ask("riser-sa, saquery PR", "saquery PR", &["PathRecord dump"]),
        ask(
            "riser-sa, saquery PIR",
            "saquery PIR",
            &["PortInfoRecord dump"],
        ),
        ask("riser-sa, saquery -c", "saquery -c", &["SA ClassPortInfo"]),
        // No host runs a subnet manager.
        ask(
            "riser-sa, saquery -s",
            "saquery -s",
            &["IsSM ports\n\nIsSM"],
        ),
        network(
            "ibacm",
            "alone {dir} fd17::1 fd17::9",
            &["the kernel has its path", "SA verification: success"],
        ),
        network(
            "ibacm, ibacm, riser-sa",
            "pair {dir} fd17::1 fd17::2 fd17::3 {programs}/riser-sa",
            &["both have found each other", "what they have set is listed"],
        ),
    ]
}

fn pingpong() -> Vec<Case> {
    // Program, options, their name.
    const RUNS: &[(&str, &str)] = &[
        ("ibv_rc_pingpong", "-c"),
        ("ibv_rc_pingpong", "-c -e"),
        ("ibv_rc_pingpong", "-c -N"),
        ("ibv_rc_pingpong", "-c -t"),
        ("ibv_rc_pingpong", "-c -o"),
        ("ibv_rc_pingpong", "-c -o -P"),
        ("ibv_rc_pingpong", "-c -O"),
        ("ibv_rc_pingpong", "-c -j"),
        ("ibv_rc_pingpong", "-c -s 1048576 -m 4096 -n 100"),
        ("ibv_uc_pingpong", "-c"),
        ("ibv_uc_pingpong", "-c -e"),
        ("ibv_ud_pingpong", "-c -s 1024"),
        ("ibv_ud_pingpong", "-c -s 1024 -e"),
        ("ibv_srq_pingpong", "-c"),
        ("ibv_srq_pingpong", "-c -e"),
        ("ibv_srq_pingpong", "-c -q 4"),
        ("ibv_xsrq_pingpong", ""),
        ("ibv_xsrq_pingpong", "-e"),
    ];
    let case = |(program, options): &(&str, &str)| {
        let server = format!("{program} -d riser0 -g {GID} -p {{port}} {options}");
        let client = format!("{server} {{server}}");
        // Each program prints its figures, or success, when all messages have come back.
        let says = match *program {
            "ibv_xsrq_pingpong" => "success",
            _ => "usec/iter",
        };
        let name = format!("{program} {options}");
        Case::pair("pingpong", name.trim(), [&server, &client], &[says]).ready(Ready::Port)
    };
    RUNS.iter().map(case).collect()
}

fn rdmacm() -> Vec<Case> {
    let rping = |name: &str, server: &str, client: &str| {
        let server = format!("rping -s -V -a {{server}} -p {{port}} {server}");
        let client = format!("rping -c -V -v -a {{server}} -I {{client}} -p {{port}} {client}");
        Case::pair("rdmacm", name, [&server, &client], &["rdma-ping-19: "])
    };
    let mut cases = vec![
        rping("rping", "-C 20", "-C 20"),
        rping("rping -S 32768", "-C 20 -S 32768", "-C 20 -S 32768"),
        rping("rping -q", "-q -C 20", "-q -C 20"),
        rping("rping, packets lost", "-C 20", "-C 20").faults("loss=1,seed=7"),
        rping("rping -P, four clients", "-P", "-C 1000")
            .clients(4)
            .asked(),
    ];
    let both = |name: &str, program: &str, options: &str, says: &[&'static str]| {
        let server = format!("{program} -b {{server}} {options}");
        let client = format!("{program} -s {{server}} -b {{client}} {options}");
        Case::pair("rdmacm", name, [&server, &client], says)
    };
    let done = &["return status 0"];
    // A GID is the address, mapped to IPv6.
    let gids = |name: &str, program: &str, options: &str| {
        let server = format!("{program} -f gid -b ::ffff:{{server}} {options}");
        let client =
            format!("{program} -f gid -s ::ffff:{{server}} -b ::ffff:{{client}} {options}");
        Case::pair("rdmacm", name, [&server, &client], done)
    };
    cases.extend([
        both("ucmatose", "ucmatose", "", done),
        both("ucmatose -c 10", "ucmatose", "-c 10 -C 100 -S 4096", done),
        both("ucmatose -P ib", "ucmatose", "-P ib", done),
        both("ucmatose -m", "ucmatose", "-m -c 4", done),
        gids("ucmatose -f gid", "ucmatose", "-c 4"),
        gids("ucmatose -f gid -P ib", "ucmatose", "-P ib"),
        gids("udaddy -f gid", "udaddy", ""),
        both("udaddy", "udaddy", "", done),
        both("udaddy -c 5", "udaddy", "-c 5 -C 20 -S 1000", done),
        both("udaddy -p 2", "udaddy", "-p 0x0002", done),
        both("cmtime", "cmtime", "-c 50 -p {port}", &["disconnect"]).asked(),
    ]);
    let group = "239.255.17.1";
    let mckey = Case::pair(
        "rdmacm",
        "mckey",
        [
            &format!("mckey -m {group} -b {{server}}"),
            &format!("mckey -m {group} -s -b {{client}}"),
        ],
        done,
    );
    // What is sent before it has joined does not arrive.
    cases.push(mckey.ready(Ready::Says("receiving data transfers")));
    let simple = |name: &str, server: &str, client: &str, says: &[&'static str]| {
        let server = format!("{server} -p {{port}}");
        let client = format!("{client} -s {{server}} -p {{port}}");
        Case::pair("rdmacm", name, [&server, &client], says)
    };
    cases.extend([
        simple("rdma_client", "rdma_server", "rdma_client", &["end 0"]),
        simple("rdma_xclient", "rdma_xserver", "rdma_xclient", &["end 0"]),
        simple(
            "rdma_xclient -c x",
            "rdma_xserver -c x",
            "rdma_xclient -c x",
            &["end 0"],
        ),
    ]);
    cases
}

fn rsockets() -> Vec<Case> {
    // A line of figures for each size.
    let figures = &["Gb/sec"];
    let both = |name: &str, program: &str, options: &str| {
        let server = format!("{program} -b {{server}} -p {{port}} {options}");
        let client = format!("{program} -s {{server}} -b {{client}} -p {{port}} {options}");
        Case::pair("rsockets", name, [&server, &client], figures)
    };
    let copy = Case {
        is_copy: true,
        ..Case::pair(
            "rsockets",
            "rcopy",
            [
                "rcopy -p {port}",
                "rcopy {dir}/first {server}:{dir}/second -p {port}",
            ],
            &["Gb/sec"],
        )
        .asked()
    };
    vec![
        both("rstream", "rstream", "-T v -I 10 -C 100"),
        both("rstream -S all", "rstream", "-T v -S all -I 10 -C 10").seconds(60),
        both("rstream -T a", "rstream", "-T v -T a -I 10 -C 100"),
        both("rstream -T n", "rstream", "-T v -T n -I 10 -C 100"),
        both("rstream -T r", "rstream", "-T v -T r -I 10 -C 100"),
        both("riostream", "riostream", "-T v -I 10"),
        both("udpong", "udpong", "-C 100")
            .ready(Ready::Datagrams)
            .asked(),
        both("udpong -T e", "udpong", "-T e -C 100")
            .ready(Ready::Datagrams)
            .asked(),
        copy,
    ]
}

/// Programs that know nothing of RDMA.
fn sockets() -> Vec<Case> {
    let both = |name: &str, server: &str, client: &str, says: &[&'static str]| Case {
        sockets: true,
        ..Case::pair("sockets", name, [server, client], says)
    };
    let iperf = |options: &str| {
        let server = "iperf3 -s -1 -B {server} -p {port}";
        let client = format!("iperf3 -c {{server}} -B {{client}} -p {{port}} -t 2 {options}");
        let name = format!("iperf3 {options}");
        both(name.trim(), server, &client, &["receiver", "iperf Done"])
            .ready(Ready::Says("Server listening"))
    };
    let python = |mode: &str| {
        let server = format!("python3 -u {{dir}}/{ECHO} {mode} {{server}} {{port}}");
        let client = format!("python3 -u {{dir}}/{ECHO} client {{server}} {{port}}");
        both(
            &format!("python, {mode}"),
            &server,
            &client,
            &["all is back"],
        )
        .ready(Ready::Says("listening"))
    };
    let socat = Case {
        is_copy: true,
        ..both(
            "socat",
            "socat -d -d -u TCP-LISTEN:{port},bind={server} CREATE:{dir}/second",
            "socat -u OPEN:{dir}/first TCP:{server}:{port}",
            &[],
        )
        .ready(Ready::Says("listening on"))
    };
    let curl = Case {
        is_copy: true,
        ..both(
            "curl",
            "python3 -u -m http.server {port} --bind {server} --directory {dir}",
            "curl -sS -o {dir}/second http://{server}:{port}/first",
            &[],
        )
        .ready(Ready::Says("Serving HTTP"))
        .asked()
    };
    vec![
        iperf(""),
        iperf("-R"),
        iperf("-P 4"),
        // Datagrams of the length that it takes by default are too long for rsockets.
        iperf("-u -l 1400"),
        socat,
        curl,
        both(
            "nc",
            "nc -n -l -v {server} {port}",
            "nc -n -z -v {server} {port}",
            &["succeeded"],
        )
        .ready(Ready::Says("Listening")),
        both(
            "redis",
            "redis-server --protected-mode no --bind {server} --port {port} --dir {dir}",
            "redis-benchmark -h {server} -p {port} -n 2000 -c 8 -t set,get -q",
            &["GET: "],
        )
        .ready(Ready::Says("Ready to accept connections"))
        .asked(),
        python("threads"),
        python("select"),
        python("epoll"),
        Case {
            variable: Some(("RDMAV_FORK_SAFE", "1")),
            ..python("fork")
        },
    ]
}

/// The program with a subnet administrator.
pub(super) const ADMINISTRATOR: &str = "riser-sa";

/// File in `{dir}` that runs ibacm, and asks it.
pub(super) const IBACM: &str = "ibacm.py";

/// File in `{dir}` with a server and a client that send bytes back.
pub(super) const ECHO: &str = "echo.py";

/// A program of perftest: which transport services it knows, and whether it takes `-e`.
struct Test {
    program: &'static str,
    services: &'static [&'static str],
    has_events: bool,
    options: &'static [&'static str],
}

fn perftest() -> Vec<Case> {
    const TESTS: &[Test] = &[
        Test {
            program: "ib_send_bw",
            services: &["RC", "UC", "UD", "XRC"],
            has_events: true,
            options: &[
                "-b",
                "-q 4",
                "--use-srq",
                "-l 8",
                "-I 64 -s 64",
                "-s 8 -Q 1",
            ],
        },
        Test {
            program: "ib_send_lat",
            services: &["RC", "UC", "UD", "XRC"],
            has_events: true,
            options: &["-I 0 -s 8"],
        },
        Test {
            program: "ib_write_bw",
            services: &["RC", "UC", "XRC"],
            has_events: false,
            options: &["-b", "-q 4", "-l 8", "--odp"],
        },
        Test {
            program: "ib_write_lat",
            services: &["RC", "UC", "XRC"],
            has_events: false,
            options: &["-I 0 -s 8"],
        },
        Test {
            program: "ib_read_bw",
            services: &["RC", "XRC"],
            has_events: true,
            options: &["-b", "-q 4", "-o 1", "--odp"],
        },
        Test {
            program: "ib_read_lat",
            services: &["RC", "XRC"],
            has_events: true,
            options: &[],
        },
        Test {
            program: "ib_atomic_bw",
            services: &["RC", "XRC"],
            has_events: true,
            options: &["-A CMP_AND_SWAP", "-A FETCH_AND_ADD", "-q 4"],
        },
        Test {
            program: "ib_atomic_lat",
            services: &["RC", "XRC"],
            has_events: true,
            options: &["-A CMP_AND_SWAP"],
        },
    ];
    TESTS.iter().flat_map(Test::cases).collect()
}

impl Test {
    fn cases(&self) -> Vec<Case> {
        let is_atomic = self.program.contains("atomic");
        let is_bandwidth = self.program.ends_with("_bw");
        // Every size up to 8 MiB, but few of each: a size that is cut wrongly shows at once. An
        // atomic operation has one size.
        let sizes = match (is_atomic, is_bandwidth) {
            (true, _) => "-n 500",
            (false, true) => "-a -n 20 -t 16",
            (false, false) => "-a -n 5",
        };
        let mut options = Vec::new();
        for service in self.services {
            options.push(format!("-c {service} {sizes}"));
        }
        if self.has_events {
            // As many small messages of UC fit the socket of a receiver that sleeps.
            let more = |service| if service == "UC" { " -s 64" } else { "" };
            let events = self.services.iter();
            options.extend(events.map(|at| format!("-c {at} -e -n 200{}", more(*at))));
        }
        if self.program.ends_with("_lat") && self.services.contains(&"UC") {
            // Short of the sizes that a receiver's socket may drop.
            options.push("-c UC -s 4096 -n 200".to_owned());
        }
        for service in ["RC", "UD"] {
            if self.services.contains(&service) {
                options.push(format!("-c {service} -R -n 200"));
            }
        }
        let more = self.options.iter();
        options.extend(more.map(|more| format!("-c RC {more} -n 200")));
        options.iter().map(|options| self.case(options)).collect()
    }

    fn case(&self, options: &str) -> Case {
        let program = self.program;
        // The program asks for itself where it is to say nothing of the processor's frequency.
        let mut server = format!("{program} -F -d riser0 -p {{port}} {options}");
        let mut client = format!("{server} {{server}}");
        let mut ready = Ready::Port;
        if options.contains("-R") {
            // The connection manager chooses the devices by these addresses.
            server += " --source_ip {server}";
            client += " --source_ip {client}";
            ready = Ready::Device;
        }
        let figures = if program.ends_with("_bw") {
            "BW average"
        } else {
            "t_typical"
        };
        let name = format!("{program} {options}");
        let case = Case::pair("perftest", &name, [&server, &client], &[figures]);
        let case = case.ready(ready).seconds(90);
        // It waits for ever for a message that the socket of a busy receiver has dropped, as UC allows.
        let may_lose = options.contains("-c UC");
        Case { may_lose, ..case }
    }
}

/// `riserd` and `riser`, whose provider `rdma_core` loads libibverbs and librdmacm: here ours.
fn disks() -> Vec<Case> {
    const AT_ANY_ADDRESS: &str = "\
backends: { disk: { kind: ram, size: 64MiB } }
targets:
  - name: iqn.2026-01.com.example:disks
    portals: [{ protocol: iser, listen: 0.0.0.0 }]
    luns: { 0: disk }
    access: open
transport: { provider: rdma_core }
";
    const CONFIG: &str = "\
backends: { disk: { kind: ram, size: 64MiB } }
targets:
  - name: iqn.2026-01.com.example:disks
    portals:
      - { protocol: srp, listen: {server}, ioc_guid: 0x0200c0ffee000001 }
      - { protocol: iser, listen: {server} }
    luns: { 0: disk }
    access: open
transport: { provider: rdma_core }
";
    const ISER: &str = "iser://{server}/iqn.2026-01.com.example:disks/0";
    let server = "{programs}/riserd run --config {dir}/riserd.yaml";
    let case = |name: &str, url: &str| {
        let client = format!(
            "{{programs}}/riser bench {url} --provider rdma_core --addr {{client}} --overwrite --verify \
             --rw randrw --mix 40 --bs 64k --depth 16 --jobs 2 --total 64M --size 32M --warm-up 0"
        );
        Case {
            config: Some(CONFIG),
            ..Case::pair(
                "disks",
                name,
                [server, &client],
                &["over riser0", "all right"],
            )
        }
        .ready(Ready::Says(" serving "))
        .asked()
    };
    vec![
        // The provider cannot ask a target for its ports.
        case(
            "srp",
            "srp://{server}/0?id_ext=0200c0ffee000001&ioc_guid=0200c0ffee000001",
        ),
        case("iser", ISER),
        // The portal is at the addresses of the library's devices, of which the kernel knows nothing.
        Case {
            config: Some(AT_ANY_ADDRESS),
            ..case("iser at any address", ISER).on_network()
        },
    ]
}

fn misuse() -> Vec<Case> {
    let refused = |name: &str, command: &str, says: &'static str| {
        Case::alone("misuse", name, command, &[says]).refused()
    };
    vec![
        refused(
            "a device that does not exist",
            "ibv_devinfo -d riser7",
            "wasn't found",
        ),
        refused(
            "a device that does not exist, rc_pingpong",
            "ibv_rc_pingpong -d riser7",
            "not found",
        ),
        refused(
            "port 2",
            "ibv_rc_pingpong -d riser0 -i 2 -g 0 -p {port}",
            "",
        ),
        refused(
            "a queue that is too long",
            "ibv_rc_pingpong -d riser0 -g 0 -r 100000000 -p {port}",
            "",
        ),
        refused(
            "rping without a server",
            "rping -c -a {server} -I {client} -p {port} -C 1",
            "",
        ),
        refused(
            "rping to an address of no host",
            "rping -c -a 192.0.2.77 -p {port} -C 1",
            "",
        ),
        refused(
            "rping from an address of no device",
            "rping -c -a {server} -I 192.0.2.77",
            "",
        ),
        refused(
            "more connections than a queue pair number has",
            "ib_send_bw -d riser0 -q 17000000 -p {port}",
            "",
        ),
    ]
}
