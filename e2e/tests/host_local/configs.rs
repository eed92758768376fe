//! Random network configurations. Valid configurations have so few addresses that they are soon exhausted. Other
//! configurations have odd values.

use serde_json::{Map, Value, json};

use super::call::{Call, DIR};
use super::rng::Rng;

const VERSIONS: [&str; 7] = [
    "0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0",
];

/// The configuration that the calls of a case share, and addresses near its ranges.
#[derive(Clone, Debug)]
pub struct Base {
    pub config: Value,
    /// Addresses inside or just outside the configuration's ranges
    pub near: Vec<String>,
}

/// Returns a random subnet and the addresses at its start.
fn subnet(rng: &mut Rng, v6: bool, third: u64) -> (String, Vec<String>) {
    let near = |at: &dyn Fn(u64) -> String| (0..20).map(at).collect();
    if v6 {
        let length = 120 + rng.below(7);
        let at = |n| format!("fd00:{third:x}::{n:x}");
        (format!("fd00:{third:x}::/{length}"), near(&at))
    } else {
        let length = 26 + rng.below(5);
        let at = |n| format!("10.9.{third}.{n}");
        (format!("10.9.{third}.0/{length}"), near(&at))
    }
}

fn range(rng: &mut Rng, v6: bool, third: u64, near: &mut Vec<String>) -> Value {
    let (subnet, addresses) = subnet(rng, v6, third);
    let mut range = Map::new();
    range.insert("subnet".into(), subnet.into());
    let mut low = 1;
    if rng.percent(40) {
        low = rng.index(6);
        range.insert("rangeStart".into(), addresses[low].clone().into());
    }
    // A range that starts at the broadcast address needs an end. Without an end, host-local would exceed the subnet.
    if rng.percent(60) || low == 3 {
        let high = low.max(1) + rng.index(5);
        range.insert("rangeEnd".into(), addresses[high].clone().into());
    }
    if rng.percent(30) {
        let gateway = match rng.below(6) {
            0 => "192.0.2.1".to_owned(),
            1 => "2001:db8::1".to_owned(),
            2 => format!("::ffff:10.9.{third}.4"),
            _ => addresses[rng.index(6)].clone(),
        };
        range.insert("gateway".into(), gateway.into());
    }
    near.extend(addresses.into_iter().take(9));
    range.into()
}

/// Adds routes, DNS settings and other fields that a plugin copies into its result.
fn extras(rng: &mut Rng, ipam: &mut Map<String, Value>) {
    if rng.percent(40) {
        let all = [
            json!({"dst": "0.0.0.0/0"}),
            json!({"dst": "::/0", "gw": "fd00::1"}),
            json!({"dst": "10.1.2.3/16", "gw": "::ffff:10.9.0.1", "mtu": 1400, "table": 0}),
            json!({"dst": "::ffff:10.0.0.0/104", "advmss": 1460, "scope": 253}),
            json!({"DST": "192.168.0.0/16", "priority": -1, "unknown": {}}),
        ];
        let routes = (0..rng.below(4)).map(|_| all[rng.index(all.len())].clone());
        let routes: Vec<Value> = routes.collect();
        ipam.insert("routes".into(), routes.into());
    }
    if rng.percent(25) {
        let file = rng.pick(&["resolv.conf", "resolv.conf", "odd.conf", "none.conf", "."]);
        ipam.insert("resolvConf".into(), format!("{DIR}/../{file}").into());
    }
}

/// Returns a configuration that is valid in most cases.
pub fn base(rng: &mut Rng) -> Base {
    let mut near = Vec::new();
    let mut third = 1 + rng.below(3);
    let mut sets = Vec::new();
    for _ in 0..=rng.below(3) {
        let v6 = rng.percent(40);
        let mut set = Vec::new();
        for _ in 0..=rng.below(3) {
            set.push(range(rng, v6, third, &mut near));
            // In 8 % of the cases, the next range has the subnet of this range. Its start and end can be equal or
            // different.
            third += u64::from(rng.percent(92));
        }
        sets.push(Value::from(set));
    }
    let mut ipam = Map::new();
    ipam.insert("type".into(), "host-local".into());
    let folder = rng.pick(&["", "/", "/state", "//a/./b"]);
    ipam.insert("dataDir".into(), format!("{DIR}{folder}").into());
    let mut config = Map::new();
    if rng.percent(30)
        && let Some(Value::Object(inline)) = sets.remove(0).get(0)
    {
        ipam.extend(inline.clone());
    }
    if rng.percent(10) && !sets.is_empty() {
        config.insert(
            "runtimeConfig".into(),
            json!({"ipRanges": [sets.remove(0)]}),
        );
    }
    if !sets.is_empty() || rng.percent(50) {
        ipam.insert("ranges".into(), sets.into());
    }
    extras(rng, &mut ipam);
    config.insert("ipam".into(), ipam.into());
    config.insert("type".into(), "bridge".into());
    config.insert("name".into(), (*rng.pick(&["net", "a.b", "N_-1"])).into());
    if rng.percent(97) {
        // Versions before 0.3.0 do not allow several sets of one family. So these versions are used less often.
        let low = if rng.percent(15) { 0 } else { 2 };
        let version = VERSIONS[low + rng.index(VERSIONS.len() - low)];
        config.insert("cniVersion".into(), version.into());
    }
    Base {
        config: config.into(),
        near,
    }
}

/// Returns an address for a request. In most cases, a plugin can assign the address.
fn address(rng: &mut Rng, base: &Base) -> String {
    match rng.below(20) {
        0 => rng
            .pick(&[
                "",
                "x",
                "10.9.1.01",
                "fe80::1%lo",
                " 10.9.1.2",
                "10.9.1.2/33",
                "0",
            ])
            .to_string(),
        1 => "192.0.2.7".to_owned(),
        2 => format!("::ffff:10.9.1.{}", rng.below(6)),
        3 | 4 => format!("{}/24", base.near[rng.index(base.near.len())]),
        _ => base.near[rng.index(base.near.len())].clone(),
    }
}

/// Sets the configuration of one call: `base`, sometimes with requests for addresses or with an odd value.
fn config(rng: &mut Rng, base: &Base, call: &mut Call) {
    let mut config = base.config.clone();
    if rng.percent(6) {
        let ips: Vec<String> = (0..rng.below(3)).map(|_| address(rng, base)).collect();
        call.asked += ips.len();
        config["args"] = json!({"cni": {"ips": ips, "other": 1}, "x": null});
    }
    if rng.percent(6) {
        let ips: Vec<String> = (0..rng.below(3)).map(|_| address(rng, base)).collect();
        call.asked += ips.len();
        config["runtimeConfig"]["ips"] = json!(ips);
    }
    if rng.percent(6) {
        odd(rng, &mut config);
        call.odd = true;
    }
    call.config = config.to_string();
    if rng.percent(4) {
        call.config = call.config.replacen("\"subnet\"", "\"SUBNET\"", 1);
    }
}

/// Replaces a random value by a value of any type.
fn odd(rng: &mut Rng, config: &mut Value) {
    let paths = [
        "/name",
        "/cniVersion",
        "/ipam/type",
        "/ipam/name",
        "/ipam/ranges",
        "/ipam/ranges/0",
        "/ipam/ranges/0/0",
        "/ipam/ranges/0/0/subnet",
        "/ipam/ranges/0/0/gateway",
        "/ipam/ranges/0/0/rangeStart",
        "/ipam/ranges/0/0/rangeEnd",
        "/ipam/routes",
        "/ipam/routes/0",
        "/ipam/routes/0/dst",
        "/ipam/routes/0/gw",
        "/ipam/routes/0/mtu",
        "/ipam/routes/0/table",
        "/ipam/resolvConf",
        "/ipam/subnet",
        "/ipam/rangeStart",
        "/args",
        "/args/cni",
        "/args/cni/ips",
        "/runtimeConfig",
        "/runtimeConfig/ips",
        "/runtimeConfig/ipRanges",
        "/runtimeConfig/ips/0",
    ];
    let values = [
        json!(null),
        json!(true),
        json!(0),
        json!(-1.5),
        json!(1e300),
        json!(""),
        json!("x\u{1}<&>é"),
        json!([]),
        json!({}),
        json!([[]]),
        json!([[{}]]),
        json!(["10.9.1.2"]),
        json!([null]),
        json!("10.9.1.0/24"),
        json!("10.9.1.1/24"),
        json!("fd00:1::/127"),
        json!("10.9.1.2"),
        json!("fd00:1::2"),
        json!("1.0.0"),
        json!("1.2.0"),
        json!("2"),
        json!("1.0.0.0"),
        json!("../net"),
        json!({"a": {"b": [1, {"c": null}]}}),
    ];
    let path = rng.pick(&paths);
    let value = values[rng.index(values.len())].clone();
    if let Some(place) = config.pointer_mut(path) {
        *place = value;
    } else if let Some((folder, key)) = path.rsplit_once('/')
        && let Some(Value::Object(folder)) = config.pointer_mut(folder)
    {
        folder.insert(key.to_owned(), value);
    }
}

/// Returns a random call, mostly ADD, DEL or CHECK, and sometimes with invalid parameters.
pub fn call(rng: &mut Rng, base: &Base) -> Call {
    let command = match rng.below(100) {
        0..48 => "ADD",
        48..78 => "DEL",
        78..90 => "CHECK",
        90..93 => "STATUS",
        93..95 => "GC",
        95..97 => "VERSION",
        97 => "",
        98 => "add",
        _ => "UPDATE",
    };
    let id = match rng.below(60) {
        0 => rng
            .pick(&["", "a/b", "../a", "-a", ".a", "é", "a b", "a\nb"])
            .to_string(),
        1 => "a".repeat(10_000),
        2..8 => format!("{:064x}", rng.below(3)),
        _ => format!("c{}", rng.below(8)),
    };
    let ifname = match rng.below(60) {
        0 => rng.pick(&[
            "",
            ".",
            "..",
            "a/b",
            "a:b",
            "a b",
            "interface-too-long",
            "a\u{a0}",
        ]),
        1..15 => "net1",
        _ => "eth0",
    };
    let mut call = Call {
        command: command.to_owned(),
        id,
        ifname: ifname.to_owned(),
        netns: if rng.percent(97) {
            "/nowhere/netns"
        } else {
            ""
        }
        .to_owned(),
        path: if rng.percent(98) { "/opt/cni/bin" } else { "" }.to_owned(),
        ..Call::default()
    };
    args(rng, base, &mut call);
    config(rng, base, &mut call);
    call
}

fn args(rng: &mut Rng, base: &Base, call: &mut Call) {
    call.args = match rng.below(24) {
        0..3 => {
            call.asked += 1;
            format!("IP={}", address(rng, base))
        }
        3 => {
            call.asked += 1;
            let ip = address(rng, base);
            format!("K8S_POD_NAMESPACE=a;IP={ip};K8S_POD_NAME=b;IgnoreUnknown=true")
        }
        4..8 => "IgnoreUnknown=1;K8S_POD_NAMESPACE=a;K8S_POD_NAME=b;K8S_POD_UID=c".to_owned(),
        8 => rng
            .pick(&[
                "A=1",
                "A=1;B=\u{1}\"",
                "IP",
                "IP=10.9.1.2;",
                "IP=1=2",
                ";",
                "=",
                "IgnoreUnknown=2",
                "IgnoreUnknown=;A=1",
                "CommonArgs=1",
                "ip=10.9.1.2",
                "IP=x;A",
                "IgnoreUnknown=True;A=é",
                "IgnoreUnknown=1;IgnoreUnknown=0;A=1",
            ])
            .to_string(),
        _ => String::new(),
    };
}
