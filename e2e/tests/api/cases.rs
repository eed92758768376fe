//! Objects that the API server accepts, and objects that it rejects. Each rejection has exactly one cause: a field and
//! the end of the server's message.

use serde_json::{Value, json};

use super::Cause;

/// The name and the spec of an object, and the cause if the API server rejects the object.
type Case = (String, Value, Option<Cause>);

const NOT_CIDR4: &str = "is not an IPv4 CIDR: write an address, / and a prefix length, such as 10.244.0.0/16 (IPv6 goes under ipv6)";
const NOT_CIDR6: &str = "is not an IPv6 CIDR: write an address, / and a prefix length, such as fd00:10:244::/48 (IPv4 goes under ipv4)";
const TOO_WIDE: &str = "is wider than a /8: give narrower ranges";
const NOT_UNICAST: &str = "is not unicast space that pods can use (it is unspecified, loopback, link-local or multicast): choose another range";
const NO_FIT: &str = "a block of this size does not fit into one of the cidrs: give a blockSize that is not less than the prefix length of any of them";
const NOT_RESERVABLE: &str = "is not a CIDR, an address or a range: write 10.244.0.0/24, 10.244.1.1 or 10.244.2.1-10.244.2.9";
const OUTSIDE_10_1_0_1: &str = r#"["10.1.0.1"]: in none of the cidrs, so there is nothing to keep out: take it off the list, or correct it"#;
const NO_KEY: &str = "a key of matchLabels is no label: it is a name of at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends, and may have a domain before it, such as example.com/zone";
const NO_VALUE: &str = "a value of matchLabels can be no label's: it is of at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends, or empty";
const NEEDS_VALUES: &str =
    "In and NotIn compare with values: give at least one, or use Exists or DoesNotExist";
const NO_VALUES: &str = "Exists and DoesNotExist take no values: remove them, or use In or NotIn";
const BAD_NAME: &str =
    "the name of a pool has at most 63 characters and no dot: choose a shorter or plainer name";

/// Returns the spec of a pool of podCIDRs in which these fields are replaced.
fn with(fields: &Value) -> Value {
    let mut spec = json!({"allocationMode": "NodeCIDR", "ipv4": {"cidrs": ["10.0.0.0/16"]}});
    for (key, value) in fields.as_object().unwrap() {
        spec[key] = value.clone();
    }
    spec
}

/// Returns the spec of a pool of blocks in which these fields are replaced.
fn blocks(fields: &Value) -> Value {
    let mut spec = with(fields);
    spec["allocationMode"] = json!("Blocks");
    spec
}

fn v4(cidrs: &[&str], block_size: u32) -> Value {
    with(&json!({"ipv4": {"cidrs": cidrs, "blockSize": block_size}}))
}

fn v6(cidrs: &[&str], block_size: u32) -> Value {
    json!({"allocationMode": "NodeCIDR", "ipv6": {"cidrs": cidrs, "blockSize": block_size}})
}

/// Returns the spec of a pool with 10.0.0.0/16, fd00::/48 and these entries in `reserved`.
fn reserved(entries: &[&str]) -> Value {
    with(&json!({"ipv6": {"cidrs": ["fd00::/48"]}, "reserved": entries}))
}

fn expression(expression: &Value) -> Value {
    with(&json!({"nodeSelector": {"matchExpressions": [expression]}}))
}

pub fn pools() -> Vec<Case> {
    let named = |(spec, cause): (Value, Option<Cause>)| ("p".to_owned(), spec, cause);
    let all = [
        families(),
        ranges(),
        block_sizes(),
        reservations(),
        selectors(),
        numbers(),
        block_terms(),
        address_terms(),
    ];
    let mut cases: Vec<Case> = all.into_iter().flatten().map(named).collect();
    let plain = with(&json!({}));
    cases.push(("a".repeat(63), plain.clone(), None));
    cases.push(("a".repeat(64), plain.clone(), Some(("<nil>", BAD_NAME))));
    cases.push(("a.b".to_owned(), plain, Some(("<nil>", BAD_NAME))));
    cases
}

fn families() -> Vec<(Value, Option<Cause>)> {
    let dual = with(&json!({"ipv6": {"cidrs": ["fd00::/48"]}}));
    let neither = json!({"allocationMode": "NodeCIDR"});
    let null = json!({"allocationMode": "NodeCIDR", "ipv4": null});
    let some = "a pool needs addresses: give ipv4, ipv6, or both for dual stack";
    vec![
        (v4(&["10.0.0.0/16"], 24), None),
        (v6(&["fd00::/48"], 64), None),
        (dual, None),
        (neither, Some(("spec", some))),
        (null, Some(("spec", some))),
        (json!({"ipv4": {"cidrs": ["10.0.0.0/16"]}}), None),
        (with(&json!({"allocationMode": "Blocks"})), None),
        (
            with(&json!({"allocationMode": "Addresses"})),
            Some((
                "spec.allocationMode",
                r#"supported values: "Blocks", "NodeCIDR""#,
            )),
        ),
        (
            v4(&[], 24),
            Some(("spec.ipv4.cidrs", "should have at least 1 items")),
        ),
    ]
}

fn ranges() -> Vec<(Value, Option<Cause>)> {
    let first4 = |message| Some(("spec.ipv4.cidrs[0]", message));
    let first6 = |message| Some(("spec.ipv6.cidrs[0]", message));
    let second6 = |message| Some(("spec.ipv6.cidrs[1]", message));
    vec![
        // CIDRs that cannot be parsed, or that belong to the other family
        (v4(&["10.0.0.0"], 24), first4(NOT_CIDR4)),
        (v4(&["10.0.0.0/33"], 32), first4(NOT_CIDR4)),
        (v4(&["10.0.0.00/24"], 24), first4(NOT_CIDR4)),
        (v4(&["10.0.0.0/024"], 24), first4(NOT_CIDR4)),
        (v4(&[" 10.0.0.0/24"], 24), first4(NOT_CIDR4)),
        (v4(&[""], 24), first4(NOT_CIDR4)),
        (v4(&["fd00::/16"], 24), first4(NOT_CIDR4)),
        (v6(&["fd00::"], 64), first6(NOT_CIDR6)),
        (v6(&["fd00::/48", "10.0.0.0/16"], 64), second6(NOT_CIDR6)),
        (v6(&["::ffff:10.0.0.0/112"], 120), first6(NOT_CIDR6)),
        (v6(&["fe80::%eth0/64"], 64), first6(NOT_CIDR6)),
        // CIDRs that are not written in canonical form
        (
            v4(&["10.0.0.1/24"], 24),
            first4("is not in canonical form: write 10.0.0.0/24"),
        ),
        (
            v6(&["FD00::/48"], 64),
            first6("is not in canonical form: write fd00::/48"),
        ),
        (
            v6(&["fd00:0:0::/48"], 64),
            first6("is not in canonical form: write fd00::/48"),
        ),
        (
            v6(&["fd00::1/48"], 64),
            first6("is not in canonical form: write fd00::/48"),
        ),
        // CIDRs that are too wide, or that are not unicast space
        (v4(&["11.0.0.0/8"], 24), None),
        (v4(&["10.0.0.0/7"], 24), first4(TOO_WIDE)),
        (v4(&["0.0.0.0/0"], 24), first4(TOO_WIDE)),
        (v6(&["fd00::/8"], 64), None),
        (v6(&["fc00::/7"], 64), first6(TOO_WIDE)),
        (v4(&["240.0.0.0/8"], 24), None),
        (v4(&["100.64.0.0/10"], 24), None),
        (v4(&["127.0.0.0/8"], 24), first4(NOT_UNICAST)),
        (v4(&["169.254.0.0/16"], 24), first4(NOT_UNICAST)),
        (v4(&["224.1.0.0/16"], 24), first4(NOT_UNICAST)),
        (v6(&["fe80::/64"], 64), first6(NOT_UNICAST)),
        (v6(&["ff02::/16"], 64), first6(NOT_UNICAST)),
        // Overlap between the CIDRs of one list
        (v4(&["10.0.0.0/24", "10.0.1.0/24", "10.0.2.0/23"], 24), None),
        (
            v4(&["10.0.0.0/24", "10.0.1.0/24", "10.0.0.0/16"], 24),
            Some((
                "spec.ipv4.cidrs",
                r#"["10.0.0.0/16"]: other ranges of the list are the same or lie inside: keep only the wider ones"#,
            )),
        ),
        (
            v6(&["fd00::/48", "fd01::/48", "fd00::/48"], 64),
            Some((
                "spec.ipv6.cidrs",
                r#"["fd00::/48", "fd00::/48"]: other ranges of the list are the same or lie inside: keep only the wider ones"#,
            )),
        ),
    ]
}

fn block_sizes() -> Vec<(Value, Option<Cause>)> {
    let size4 = |message| Some(("spec.ipv4.blockSize", message));
    let size6 = |message| Some(("spec.ipv6.blockSize", message));
    vec![
        (v4(&["10.0.0.0/24"], 24), None),
        (v4(&["10.0.0.0/16", "10.1.0.0/25"], 24), size4(NO_FIT)),
        (v4(&["10.0.0.1/32"], 32), None),
        (
            v4(&["10.0.0.0/16"], 33),
            size4("should be less than or equal to 32"),
        ),
        (v6(&["fd00::/64"], 64), None),
        (v6(&["fd00::/65"], 64), size6(NO_FIT)),
        (v6(&["fd00::1/128"], 128), None),
        (
            v6(&["fd00::/64"], 129),
            size6("should be less than or equal to 128"),
        ),
        // A pool without `blockSize` has a default size, which must fit too
        (
            with(&json!({"ipv4": {"cidrs": ["10.0.0.0/25"]}})),
            size4(NO_FIT),
        ),
        (with(&json!({"ipv4": {"cidrs": ["10.0.0.0/24"]}})), None),
        (blocks(&json!({"ipv4": {"cidrs": ["10.0.0.0/26"]}})), None),
        (
            blocks(&json!({"ipv4": {"cidrs": ["10.0.0.0/27"]}})),
            size4(NO_FIT),
        ),
        (blocks(&json!({"ipv6": {"cidrs": ["fd00::/122"]}})), None),
        (
            blocks(&json!({"ipv6": {"cidrs": ["fd00::/123"]}})),
            size6(NO_FIT),
        ),
    ]
}

fn reservations() -> Vec<(Value, Option<Cause>)> {
    let first = |message| Some(("spec.reserved[0]", message));
    let across = "is a range from one family to the other: give both ends of the same family";
    vec![
        (
            reserved(&["10.0.0.0/24", "fd00::/64", "10.0.1.1", "fd00::1"]),
            None,
        ),
        (
            reserved(&["10.0.2.1-10.0.2.9", "fd00::1:1-fd00::1:ffff"]),
            None,
        ),
        (reserved(&["10.0.0.1-10.0.0.1", "fd00::1-fd00::1"]), None),
        (reserved(&["0.0.0.0-255.255.255.255", "::-ffff::"]), None),
        (
            reserved(&["10.0.0.255-10.0.1.0", "fd00::ffff-fd00::1:0"]),
            None,
        ),
        (
            reserved(&["127.255.255.255-128.0.0.0", "7fff::-8000::"]),
            None,
        ),
        (reserved(&["9.9.9.9-10.0.0.1", "fd00::9-fd00::a"]), None),
        // Entries that cannot be parsed
        (reserved(&["gateway"]), first(NOT_RESERVABLE)),
        (reserved(&[""]), first(NOT_RESERVABLE)),
        (reserved(&["-"]), first(NOT_RESERVABLE)),
        (reserved(&["10.0.0.1-"]), first(NOT_RESERVABLE)),
        (reserved(&["-10.0.0.1"]), first(NOT_RESERVABLE)),
        (reserved(&["10.0.0.1 - 10.0.0.2"]), first(NOT_RESERVABLE)),
        (reserved(&["10.0.0.1-9"]), first(NOT_RESERVABLE)),
        (
            reserved(&["10.0.0.1-10.0.0.2-10.0.0.3"]),
            first(NOT_RESERVABLE),
        ),
        (
            reserved(&["10.0.0.0/24-10.0.1.0/24"]),
            first(NOT_RESERVABLE),
        ),
        // Entries that are not written in canonical form
        (
            reserved(&["10.0.0.1/24"]),
            first("is not in canonical form: write 10.0.0.0/24"),
        ),
        (
            reserved(&["FD00::1"]),
            first("is not in canonical form: write fd00::1"),
        ),
        (
            reserved(&["fd00::1-fd00:0::2"]),
            first("is not in canonical form: write fd00::1-fd00::2"),
        ),
        // Ranges across families, ranges that end before they begin, and duplicates
        (reserved(&["10.0.0.1-fd00::1"]), first(across)),
        (reserved(&["::1-10.0.0.1"]), first(across)),
        (
            reserved(&["10.0.0.9-10.0.0.1"]),
            first("is a range that ends before it begins: write 10.0.0.1-10.0.0.9"),
        ),
        (
            reserved(&["10.0.1.0-10.0.0.255"]),
            first("is a range that ends before it begins: write 10.0.0.255-10.0.1.0"),
        ),
        (
            reserved(&["128.0.0.0-127.255.255.255"]),
            first("is a range that ends before it begins: write 127.255.255.255-128.0.0.0"),
        ),
        (
            reserved(&["fd00::a-fd00::9"]),
            first("is a range that ends before it begins: write fd00::9-fd00::a"),
        ),
        (
            reserved(&["8000::-7fff::ffff"]),
            first("is a range that ends before it begins: write 7fff::ffff-8000::"),
        ),
        (
            reserved(&["10.0.0.1", "10.0.0.2", "10.0.0.1"]),
            Some(("spec.reserved[2]", r#"Duplicate value: "10.0.0.1""#)),
        ),
        // Each reserved entry must overlap a CIDR of the pool
        (reserved(&["10.0.0.0/8", "fd00::/32"]), None),
        (reserved(&["10.0.255.250-10.1.0.5"]), None),
        (reserved(&["9.0.0.0-11.0.0.0", "9.0.0.0-9.5.0.0"]), None),
        (
            reserved(&["10.0.0.1", "10.1.0.1"]),
            Some(("spec.reserved", OUTSIDE_10_1_0_1)),
        ),
        (
            reserved(&["10.1.0.0/24", "10.0.0.1", "10.2.0.1-10.2.0.9"]),
            Some((
                "spec.reserved",
                r#"["10.1.0.0/24", "10.2.0.1-10.2.0.9"]: in none of the cidrs, so there is nothing to keep out: take it off the list, or correct it"#,
            )),
        ),
        (
            reserved(&["fd00:1::1", "fd00::1", "fd01::/64", "fd02::1-fd02::2"]),
            Some((
                "spec.reserved",
                r#"["fd00:1::1", "fd01::/64", "fd02::1-fd02::2"]: in none of the cidrs, so there is nothing to keep out: take it off the list, or correct it"#,
            )),
        ),
        (
            with(&json!({"reserved": ["fd00::1"]})),
            Some((
                "spec.reserved",
                r#"["fd00::1"]: in none of the cidrs, so there is nothing to keep out: take it off the list, or correct it"#,
            )),
        ),
    ]
}

fn selectors() -> Vec<(Value, Option<Cause>)> {
    const FIRST: &str = "spec.nodeSelector.matchExpressions[0]";
    let labels = |labels: &Value| with(&json!({"nodeSelector": {"matchLabels": labels}}));
    vec![
        (with(&json!({"nodeSelector": {}})), None),
        (
            labels(&json!({"example.com/zone": "a-1", "empty": ""})),
            None,
        ),
        (
            labels(&json!({"zone": "not a value"})),
            Some(("spec.nodeSelector.matchLabels", NO_VALUE)),
        ),
        (
            labels(&json!({"zone": "v".repeat(64)})),
            Some((
                "spec.nodeSelector.matchLabels.zone",
                "may not be more than 63 bytes",
            )),
        ),
        (labels(&json!({"a.b-c.example/A_b.c": "a"})), None),
        (labels(&json!({"n".repeat(63): "a"})), None),
        (
            labels(&json!({"not a key": "a"})),
            Some(("spec.nodeSelector.matchLabels", NO_KEY)),
        ),
        (
            labels(&json!({"n".repeat(64): "a"})),
            Some(("spec.nodeSelector.matchLabels", NO_KEY)),
        ),
        (
            labels(&json!({"example..com/zone": "a"})),
            Some(("spec.nodeSelector.matchLabels", NO_KEY)),
        ),
        (
            with(&json!({"podSelector": {"matchLabels": {"/zone": "a"}}})),
            Some(("spec.podSelector.matchLabels", NO_KEY)),
        ),
        (
            with(&json!({"namespaceSelector": {"matchLabels": {"zone": "a b"}}})),
            Some(("spec.namespaceSelector.matchLabels", NO_VALUE)),
        ),
        (
            expression(&json!({"key": "zone", "operator": "In", "values": ["a", "b"]})),
            None,
        ),
        (
            expression(&json!({"key": "zone", "operator": "NotIn", "values": ["a"]})),
            None,
        ),
        (
            expression(&json!({"key": "node-role.kubernetes.io/edge", "operator": "Exists"})),
            None,
        ),
        (
            expression(&json!({"key": "zone", "operator": "DoesNotExist", "values": []})),
            None,
        ),
        (
            expression(&json!({"key": "zone", "operator": "In"})),
            Some((FIRST, NEEDS_VALUES)),
        ),
        (
            expression(&json!({"key": "zone", "operator": "NotIn", "values": []})),
            Some((FIRST, NEEDS_VALUES)),
        ),
        (
            expression(&json!({"key": "zone", "operator": "Exists", "values": ["a"]})),
            Some((FIRST, NO_VALUES)),
        ),
        (
            expression(&json!({"key": "zone", "operator": "DoesNotExist", "values": ["a"]})),
            Some((FIRST, NO_VALUES)),
        ),
        (
            expression(&json!({"key": "zone", "operator": "Is", "values": ["a"]})),
            Some((
                "spec.nodeSelector.matchExpressions[0].operator",
                r#"supported values: "In", "NotIn", "Exists", "DoesNotExist""#,
            )),
        ),
        (
            expression(&json!({"key": "not a key", "operator": "Exists"})),
            Some((
                "spec.nodeSelector.matchExpressions[0].key",
                "should match '^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$'",
            )),
        ),
    ]
}

fn numbers() -> Vec<(Value, Option<Cause>)> {
    let quarantine = |seconds: i64| with(&json!({ "quarantineSeconds": seconds }));
    let field = "spec.quarantineSeconds";
    vec![
        (quarantine(0), None),
        (quarantine(86_400), None),
        (
            quarantine(-1),
            Some((field, "should be greater than or equal to 0")),
        ),
        (
            quarantine(86_401),
            Some((field, "should be less than or equal to 86400")),
        ),
        (with(&json!({"priority": -5, "disabled": true})), None),
    ]
}

fn address_terms() -> Vec<(Value, Option<Cause>)> {
    let one = |key: &str, value: Value| blocks(&json!({ key: value }));
    let gateway4 =
        |gateway: &str| with(&json!({"ipv4": {"cidrs": ["10.0.0.0/16"], "gateway": gateway}}));
    let gateway6 = |gateway: &str| json!({"allocationMode": "NodeCIDR", "ipv6": {"cidrs": ["fd00::/48"], "gateway": gateway}});
    let no_gateway4 = "is neither None nor an IPv4 address: write one such as 10.244.0.1, or leave it out for the first usable address of each block";
    let no_gateway6 = "is neither None nor an IPv6 address: write one such as fd00::1, or leave it out for the first usable address of each block";
    let outside = "lies in none of the cidrs, where pods cannot reach it: give an address of the pool, leave it out for the first usable address of each block, or set addressPrefix to Host if pods have a way to it all the same";
    let on_host = |family: &str, cidr: &str, gateway: &str| json!({"addressPrefix": "Host", family: {"cidrs": [cidr], "gateway": gateway}});
    let dns = |key: &str, value: Value| one("dns", json!({ key: value }));
    let route = |dst: &str, gw: &str| one("routes", json!([{"dst": dst, "gw": gw}]));
    vec![
        (one("warm", json!({"low": 0, "high": 0})), None),
        (one("warm", json!({"low": 50})), None),
        (
            one("warm", json!({"low": 51})),
            Some((
                "spec.warm",
                "low is more than high: blocks would be asked for and given back in turn",
            )),
        ),
        (
            one("warm", json!({"low": -1})),
            Some(("spec.warm.low", "should be greater than or equal to 0")),
        ),
        (one("cooldownSeconds", json!(0)), None),
        (
            one("cooldownSeconds", json!(86_401)),
            Some((
                "spec.cooldownSeconds",
                "should be less than or equal to 86400",
            )),
        ),
        (one("addressPrefix", json!("Pool")), None),
        (
            one("addressPrefix", json!("Node")),
            Some((
                "spec.addressPrefix",
                r#"supported values: "Block", "Pool", "Host""#,
            )),
        ),
        (gateway4("None"), None),
        (gateway4("10.0.0.1"), None),
        (
            gateway4("fd00::1"),
            Some(("spec.ipv4.gateway", no_gateway4)),
        ),
        (gateway4("none"), Some(("spec.ipv4.gateway", no_gateway4))),
        (gateway6("fd00::1"), None),
        (
            gateway6("10.0.0.1"),
            Some(("spec.ipv6.gateway", no_gateway6)),
        ),
        (
            gateway6("FD00::1"),
            Some((
                "spec.ipv6.gateway",
                "is not in canonical form: write fd00::1",
            )),
        ),
        (gateway4("10.1.0.1"), Some(("spec.ipv4.gateway", outside))),
        (gateway6("fd00:1::1"), Some(("spec.ipv6.gateway", outside))),
        (gateway6("fe80::1"), None),
        (on_host("ipv4", "10.0.0.0/16", "169.254.1.1"), None),
        (on_host("ipv6", "fd00::/48", "fd00:1::1"), None),
        (route("0.0.0.0/0", "10.0.0.1"), None),
        (one("routes", json!([{"dst": "fd00::/8"}])), None),
        (
            route("0.0.0.0", "10.0.0.1"),
            Some((
                "spec.routes[0].dst",
                "is not a CIDR: write an address, / and a prefix length",
            )),
        ),
        (
            route("0.0.0.0/0", "gateway"),
            Some((
                "spec.routes[0].gw",
                "is not an address: write one such as 10.244.0.1 or fd00::1",
            )),
        ),
        (
            one(
                "dns",
                json!({"nameservers": ["10.96.0.10"], "domain": "a.example", "search": ["b.example"], "options": ["ndots:5"]}),
            ),
            None,
        ),
        (dns("nameservers", json!(["fd00::a", "10.0.0.10"])), None),
        (
            dns("nameservers", json!(["10.0.0.10", "dns.example"])),
            Some((
                "spec.dns.nameservers[1]",
                "is no address: write one such as 10.96.0.10",
            )),
        ),
        (
            dns("search", json!([".", "cluster.local.", "_x.example"])),
            None,
        ),
        (
            dns("search", json!(["a.example b.example"])),
            Some((
                "spec.dns.search[0]",
                "is no domain: write one such as svc.cluster.local",
            )),
        ),
        (
            dns("search", json!(["a..example"])),
            Some((
                "spec.dns.search[0]",
                "is no domain: write one such as svc.cluster.local",
            )),
        ),
        (
            dns("domain", json!("a/b")),
            Some((
                "spec.dns.domain",
                "is no domain: write one such as cluster.local, or leave it out",
            )),
        ),
        (dns("domain", json!("")), None),
        (
            dns("options", json!(["edns0", "timeout:2", "trust-ad"])),
            None,
        ),
        (
            dns("options", json!(["ndots:5 edns0"])),
            Some((
                "spec.dns.options[0]",
                "is no option of a resolver: write one an entry, without spaces, such as ndots:5",
            )),
        ),
        (
            dns("options", json!(["ndots:5\n"])),
            Some((
                "spec.dns.options[0]",
                "is no option of a resolver: write one an entry, without spaces, such as ndots:5",
            )),
        ),
    ]
}

fn block_terms() -> Vec<(Value, Option<Cause>)> {
    let one = |key: &str, value: Value| blocks(&json!({ key: value }));
    let expression = json!({"matchExpressions": [{"key": "zone", "operator": "In"}]});
    let mut cases = vec![
        (one("assignment", json!("Manual")), None),
        (
            one("assignment", json!("ByName")),
            Some((
                "spec.assignment",
                r#"supported values: "Automatic", "Manual""#,
            )),
        ),
        (one("firstBlock", json!("OnDemand")), None),
        (
            one("firstBlock", json!("Never")),
            Some((
                "spec.firstBlock",
                r#"supported values: "Immediate", "OnDemand""#,
            )),
        ),
        (
            one("namespaceSelector", json!({"matchLabels": {"team": "a"}})),
            None,
        ),
        (
            one("podSelector", json!({"matchLabels": {"app": "a"}})),
            None,
        ),
        (
            one("namespaceSelector", expression.clone()),
            Some(("spec.namespaceSelector.matchExpressions[0]", NEEDS_VALUES)),
        ),
        (
            one("podSelector", expression),
            Some(("spec.podSelector.matchExpressions[0]", NEEDS_VALUES)),
        ),
    ];
    let at_least = |least| match least {
        0 => "should be greater than or equal to 0",
        _ => "should be greater than or equal to 1",
    };
    for (key, field, least, most, too_much) in [
        (
            "maxBlocksPerNode",
            "spec.maxBlocksPerNode",
            1,
            4_096,
            "should be less than or equal to 4096",
        ),
        (
            "idleSeconds",
            "spec.idleSeconds",
            0,
            86_400,
            "should be less than or equal to 86400",
        ),
        (
            "nearlyExhaustedPercent",
            "spec.nearlyExhaustedPercent",
            1,
            100,
            "should be less than or equal to 100",
        ),
    ] {
        cases.push((one(key, json!(least)), None));
        cases.push((one(key, json!(most)), None));
        cases.push((one(key, json!(least - 1)), Some((field, at_least(least)))));
        cases.push((one(key, json!(most + 1)), Some((field, too_much))));
    }
    cases
}

/// IPAMBlocks. The name keeps a second block with the same CIDR from being created, so the name must follow from the
/// CIDR.
pub fn ipam_blocks() -> Vec<Case> {
    const PLAIN: &str = "10-244-1-64-26";
    const NAME: &str = "the name of a block is its cidr with - for every other sign: blocks are written by the controller alone";
    let with = |name: &str, fields: Value, cause| {
        let mut spec = block("10.244.1.64/26");
        for (key, value) in fields.as_object().unwrap() {
            spec[key] = value.clone();
        }
        (name.to_owned(), spec, cause)
    };
    let of = |name: &str, cidr: &str, cause| with(name, json!({ "cidr": cidr }), cause);
    let owner = |kind: &str| json!({"owner": {"kind": kind, "name": "n1", "uid": "u1", "providerID": "p", "machineID": "m"}});
    vec![
        of(PLAIN, "10.244.1.64/26", None),
        of("fd00-10-244--40-122", "fd00:10:244::40/122", None),
        of("fd00---64", "fd00::/64", None),
        of("10-244-1-65-26", "10.244.1.64/26", Some(("<nil>", NAME))),
        of("block-1", "10.244.1.64/26", Some(("<nil>", NAME))),
        of(
            "10-244-1-65-26",
            "10.244.1.65/26",
            Some((
                "spec.cidr",
                "is not in canonical form: write 10.244.1.64/26",
            )),
        ),
        of(
            "all-of-it",
            "all.of/it",
            Some((
                "spec.cidr",
                "is not a CIDR: write an address, / and a prefix length",
            )),
        ),
        with(PLAIN, owner("Quarantine"), None),
        with(PLAIN, json!({"until": "2026-11-21T10:00:00Z"}), None),
        with(
            PLAIN,
            owner("Pod"),
            Some((
                "spec.owner.kind",
                r#"supported values: "Node", "Quarantine""#,
            )),
        ),
        with(
            PLAIN,
            json!({"owner": {"kind": "Node", "name": "n1"}}),
            Some(("spec.owner.uid", "Required value")),
        ),
    ]
}

/// Returns the spec of a block that belongs to a live node.
pub fn block(cidr: &str) -> Value {
    json!({
        "cidr": cidr, "pool": "default", "since": "2026-11-21T10:00:00Z",
        "owner": {"kind": "Node", "name": "n1", "uid": "u1"},
    })
}

pub fn subnets() -> Vec<Case> {
    const FIRST: &str = "spec.podCIDRs[0].cidr";
    let held = |cidrs: &[&str]| {
        let ranges: Vec<Value> = cidrs.iter().map(|cidr| json!({ "cidr": cidr })).collect();
        json!({"nodeUID": "u", "podCIDRs": ranges})
    };
    let previous = |cidr: &str| {
        let ranges = [json!({"cidr": cidr, "pool": "default"})];
        json!({"quarantined": [{"nodeUID": "u", "podCIDRs": ranges, "until": "2026-11-21T10:00:00Z"}]})
    };
    let held_block = || json!({"cidr": "10.244.1.64/26", "uid": "b1", "pool": "default"});
    let listed = |fields: Value| {
        let mut block = held_block();
        for (key, value) in fields.as_object().unwrap() {
            block[key] = value.clone();
        }
        json!({"nodeUID": "u", "blocks": [block]})
    };
    let case = |spec, cause| ("n".to_owned(), spec, cause);
    vec![
        case(held(&["10.244.1.0/24", "fd00::/64"]), None),
        case(held(&["10.0.0.0/7", "127.0.0.0/24"]), None),
        case(
            held(&["10.244.1.0"]),
            Some((
                FIRST,
                "is not a CIDR: write an address, / and a prefix length",
            )),
        ),
        case(
            held(&["10.244.1.7/24"]),
            Some((FIRST, "is not in canonical form: write 10.244.1.0/24")),
        ),
        case(
            held(&["10.244.1.0/24", "10.244.1.0/24"]),
            Some((
                "spec.podCIDRs[1]",
                r#"Duplicate value: {"cidr":"10.244.1.0/24"}"#,
            )),
        ),
        case(previous("10.244.1.0/24"), None),
        case(
            previous("10.244.1.7/24"),
            Some((
                "spec.quarantined[0].podCIDRs[0].cidr",
                "is not in canonical form: write 10.244.1.0/24",
            )),
        ),
        case(
            json!({"quarantined": [{"nodeUID": "u"}]}),
            Some(("spec.quarantined[0].until", "Required value")),
        ),
        case(listed(json!({})), None),
        case(
            listed(
                json!({"recall": "Drain", "reserved": ["10.244.1.64", "10.244.1.70-10.244.1.79"]}),
            ),
            None,
        ),
        case(
            listed(json!({"recall": "Now"})),
            Some((
                "spec.blocks[0].recall",
                r#"supported values: "IfEmpty", "Drain""#,
            )),
        ),
        case(
            listed(json!({"cidr": "10.244.1.65/26"})),
            Some((
                "spec.blocks[0].cidr",
                "is not in canonical form: write 10.244.1.64/26",
            )),
        ),
        case(
            json!({"blocks": [held_block(), held_block()]}),
            Some((
                "spec.blocks[1]",
                r#"Duplicate value: {"cidr":"10.244.1.64/26"}"#,
            )),
        ),
        case(
            json!({"blocks": [{"cidr": "10.244.1.64/26", "pool": "default"}]}),
            Some(("spec.blocks[0].uid", "Required value")),
        ),
        case(
            json!({"pools": [{"name": "default"}], "leakCandidates": [{"address": "10.244.1.65", "podUID": "p"}]}),
            None,
        ),
        // A node name of the maximum length, 253 characters
        (
            ["n".repeat(63).as_str(); 4].join(".")[..253].to_owned(),
            held(&["10.244.1.0/24"]),
            None,
        ),
    ]
}

/// Statuses that an agent may or may not write to an existing NodeSubnet, and the cause if the API server rejects the
/// status.
pub fn statuses() -> Vec<(Value, Option<Cause>)> {
    vec![
        (
            json!({
                "nodeUID": "u", "pools": [{"pool": "default", "demand": 40}],
                "blocks": [{"cidr": "10.244.1.64/26", "uid": "b1", "used": 1, "cooling": 2, "free": 61}],
                "orphans": [{"address": "10.244.1.65", "podUID": "p1"}],
            }),
            None,
        ),
        (
            json!({"blocks": [{"cidr": "10.244.1.64/26", "uid": "b1", "released": true}, {"cidr": "10.244.1.64/26", "uid": "b2"}]}),
            None,
        ),
        (
            json!({"pools": [{"pool": "default", "demand": -1}]}),
            Some((
                "status.pools[0].demand",
                "should be greater than or equal to 0",
            )),
        ),
        (
            json!({"pools": [{"pool": "a", "demand": 1}, {"pool": "a", "demand": 2}]}),
            Some(("status.pools[1]", r#"Duplicate value: {"pool":"a"}"#)),
        ),
        (
            json!({"blocks": [{"cidr": "10.244.1.64/26"}]}),
            Some(("status.blocks[0].uid", "Required value")),
        ),
        (
            json!({"blocks": [{"cidr": "10.244.1.64/26", "uid": "b1", "used": -1}]}),
            Some((
                "status.blocks[0].used",
                "should be greater than or equal to 0",
            )),
        ),
        (
            json!({"orphans": [{"podUID": "p1"}]}),
            Some(("status.orphans[0].address", "Required value")),
        ),
    ]
}

/// A pool's spec before and after an update, and the cause if the API server rejects the update.
pub fn transitions() -> Vec<(Value, Value, Option<Cause>)> {
    let dual = with(&json!({"ipv6": {"cidrs": ["fd00::/48"]}}));
    let v4_alone = v4(&["10.0.0.0/16"], 24);
    let v6_alone = v6(&["fd00::/48"], 64);
    let two = |reserved: &[&str], cidrs: &[&str]| {
        with(&json!({"ipv4": {"cidrs": cidrs}, "reserved": reserved}))
    };
    vec![
        // Removing a CIDR that contains a reserved entry is allowed; adding an entry then makes the server check the
        // whole list
        (
            two(&["10.1.0.1"], &["10.0.0.0/16", "10.1.0.0/16"]),
            two(&["10.1.0.1"], &["10.0.0.0/16"]),
            None,
        ),
        (
            two(&["10.1.0.1"], &["10.0.0.0/16", "10.1.0.0/16"]),
            two(&["10.0.0.1", "10.1.0.1"], &["10.0.0.0/16"]),
            Some(("spec.reserved", OUTSIDE_10_1_0_1)),
        ),
        (v4_alone.clone(), dual.clone(), None),
        (
            v4_alone.clone(),
            v4(&["10.0.0.0/16", "10.5.0.0/16"], 20),
            None,
        ),
        (
            v4(&["10.0.0.0/16", "10.5.0.0/16"], 24),
            v4_alone.clone(),
            None,
        ),
        (
            with(&json!({})),
            blocks(&json!({})),
            Some((
                "spec.allocationMode",
                "is immutable: add a new pool that allocates the other way, and set disabled on this one",
            )),
        ),
        (
            dual.clone(),
            v4_alone,
            Some((
                "spec.ipv6",
                "ipv6 cannot be removed, as nodes may hold ranges of it: put it back, set disabled, and add a new pool for the other family",
            )),
        ),
        (
            dual,
            v6_alone,
            Some((
                "spec.ipv4",
                "ipv4 cannot be removed, as nodes may hold ranges of it: put it back, set disabled, and add a new pool for the other family",
            )),
        ),
    ]
}
