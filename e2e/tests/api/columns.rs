//! The columns that `kubectl get` prints for each kind.

use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::json;

use super::{Lab, block, cases, pool, subnet};

const POOLS: &str = r"
NAME    IPV4            USED4   IPV6               USED6   NODES   WAITING   EXHAUSTED   PRIORITY   READY   REASON              AGE
dual    10.244.0.0/16   37%     fd00:10:244::/48   1%      187     0                     10         True    Serving
fresh                           fd00:1::/48                                              0
spent   10.9.0.0/24     100%                               4       3         True        0          False   OverlapsOlderPool
";

const POOLS_WIDE: &str = r#"
BLOCK4   FREE4   ALLOCATED4   QUARANTINED4   EXHAUSTSAT4   BLOCK6   ALLOCATED6   QUARANTINED6   DISABLED   SELECTOR                       MESSAGE
24       323     187          2                            64       187          2              false                                     serves the nodes it selects
                                                                                                false
26       0       4            0                                                                 true       {"matchLabels":{"zone":"a"}}   allocates nothing: overlaps dual
"#;

const SUBNETS: &str = "
NAME   CIDR            POOL   CIDR2       BLOCK            BLOCKPOOL   QUARANTINED     UNTIL                  AGE
gone                                                                   10.244.9.0/24   2026-11-21T10:00:00Z
n1     10.244.1.0/24   dual   fd00::/64
n2     192.0.2.0/24                       10.244.1.64/26   default     10.244.3.0/24   2026-11-21T10:00:00Z
";

const SUBNETS_WIDE: &str = "
POOL2   QUARANTINED2    NODEUID   PROVIDERID
        fd00:0:9::/64
dual                    u1        cloud:///n1
                        u2
";

const BLOCKS: &str = "
NAME             CIDR             POOL      OWNER        NODE   SINCE       UNTIL                  AGE
10-244-1-64-26   10.244.1.64/26   default   Node         n1     <invalid>
fd00---122       fd00::/122       default   Quarantine   n2     <invalid>   2026-11-21T10:00:00Z
";

const BLOCKS_WIDE: &str = "
NODEUID
u1
u2
";

impl Lab {
    pub(crate) async fn columns(&self) {
        self.clear().await;
        self.make_pools().await;
        self.make_subnets().await;
        self.make_blocks().await;
        assert_eq!(self.get(&["ippools"]).await, POOLS.trim_start());
        assert_eq!(self.wide("ipp").await, POOLS_WIDE.trim_start());
        assert_eq!(self.get(&["nodesubnets"]).await, SUBNETS.trim_start());
        assert_eq!(self.wide("nsub").await, SUBNETS_WIDE.trim_start());
        assert_eq!(self.get(&["ipamblocks"]).await, BLOCKS.trim_start());
        assert_eq!(self.wide("block").await, BLOCKS_WIDE.trim_start());
        let all = self.get(&["cadastre", "-o", "name"]).await;
        assert!(all.contains("ippool.cadastre.dev/dual\n"), "{all}");
        assert!(all.contains("nodesubnet.cadastre.dev/n1\n"), "{all}");
        assert!(all.contains("ipamblock.cadastre.dev/fd00---122\n"), "{all}");
    }

    async fn clear(&self) {
        let all = (DeleteParams::default(), ListParams::default());
        for kind in [&self.pools, &self.subnets, &self.blocks] {
            kind.delete_collection(&all.0, &all.1).await.unwrap();
        }
    }

    async fn make_pools(&self) {
        let pools = [
            (
                "dual",
                json!({
                    "allocationMode": "NodeCIDR", "priority": 10,
                    "ipv4": {"cidrs": ["10.244.0.0/16", "10.8.0.0/16"], "blockSize": 24},
                    "ipv6": {"cidrs": ["fd00:10:244::/48"], "blockSize": 64},
                }),
            ),
            ("fresh", json!({"ipv6": {"cidrs": ["fd00:1::/48"]}})),
            (
                "spent",
                json!({
                    "allocationMode": "NodeCIDR", "disabled": true,
                    "ipv4": {"cidrs": ["10.9.0.0/24"], "blockSize": 26},
                    "nodeSelector": {"matchLabels": {"zone": "a"}},
                }),
            ),
        ];
        for (name, spec) in pools {
            self.create(&pool(name, &spec)).await;
        }
        let ready = |status: &str, reason: &str, message: &str| {
            json!([{
                "type": "Ready", "status": status, "reason": reason, "message": message,
                "lastTransitionTime": "2026-11-21T10:00:00Z",
            }])
        };
        let family = |size: u8, free: &str, held: &str, quarantined: &str, utilization: &str| {
            json!({
                "blockSize": size, "capacity": "512", "allocated": held, "quarantined": quarantined, "free": free,
                "utilization": utilization,
            })
        };
        let mut spent = ready(
            "False",
            "OverlapsOlderPool",
            "allocates nothing: overlaps dual",
        );
        let mut exhausted = spent[0].clone();
        exhausted["type"] = json!("Exhausted");
        exhausted["status"] = json!("True");
        spent.as_array_mut().unwrap().push(exhausted);
        let statuses = [
            (
                "dual",
                json!({
                    "ipv4": family(24, "323", "187", "2", "37%"), "ipv6": family(64, "65346", "187", "2", "1%"),
                    "nodes": 187, "waiting": 0,
                    "conditions": ready("True", "Serving", "serves the nodes it selects"),
                }),
            ),
            (
                "spent",
                json!({
                    "ipv4": family(26, "0", "4", "0", "100%"), "nodes": 4, "waiting": 3,
                    "conditions": spent,
                }),
            ),
        ];
        for (name, status) in statuses {
            let patch = Patch::Merge(json!({ "status": status }));
            self.pools
                .patch_status(name, &PatchParams::default(), &patch)
                .await
                .unwrap();
        }
    }

    async fn make_subnets(&self) {
        let previous = json!([{
            "nodeUID": "u0", "until": "2026-11-21T10:00:00Z",
            "podCIDRs": [{"cidr": "10.244.9.0/24", "pool": "dual"}, {"cidr": "fd00:0:9::/64", "pool": "dual"}],
        }]);
        let subnets = [
            (
                "n1",
                json!({
                    "nodeUID": "u1", "providerID": "cloud:///n1",
                    "podCIDRs": [{"cidr": "10.244.1.0/24", "pool": "dual"}, {"cidr": "fd00::/64", "pool": "dual"}],
                }),
            ),
            (
                "n2",
                json!({
                    "nodeUID": "u2", "podCIDRs": [{"cidr": "192.0.2.0/24"}],
                    "blocks": [{"cidr": "10.244.1.64/26", "uid": "b1", "pool": "default"}],
                    "quarantined": [{
                        "nodeUID": "u0", "until": "2026-11-21T10:00:00Z",
                        "podCIDRs": [{"cidr": "10.244.3.0/24"}],
                    }],
                }),
            ),
            ("gone", json!({ "quarantined": previous })),
        ];
        for (name, spec) in subnets {
            let subnet = subnet(name, &spec);
            self.subnets
                .create(&PostParams::default(), &subnet)
                .await
                .unwrap();
        }
    }

    async fn make_blocks(&self) {
        let [mut held, mut resting] = ["10.244.1.64/26", "fd00::/122"].map(cases::block);
        // `since` is in the future. kubectl then prints a constant age, which does not change while the test runs.
        held["since"] = json!("2999-11-21T10:00:00Z");
        resting["since"] = held["since"].clone();
        resting["owner"] = json!({"kind": "Quarantine", "name": "n2", "uid": "u2"});
        resting["until"] = json!("2026-11-21T10:00:00Z");
        for (name, spec) in [("10-244-1-64-26", held), ("fd00---122", resting)] {
            let block = block(name, &spec);
            self.blocks
                .create(&PostParams::default(), &block)
                .await
                .unwrap();
        }
    }

    /// Returns the output of `kubectl get` without ages and trailing blanks.
    async fn get(&self, args: &[&str]) -> String {
        let args: Vec<&str> = ["get"].into_iter().chain(args.iter().copied()).collect();
        let text = self.cluster.kubectl(&args).await.unwrap();
        let age = text.lines().next().and_then(|header| header.find("AGE"));
        let without_age = |(number, line): (usize, &str)| match age {
            Some(at) if number > 0 && line.len() > at => {
                let rest: String = line[at..].chars().skip_while(|c| *c != ' ').collect();
                let gone = line.len() - at - rest.len();
                format!("{}{}{rest}", &line[..at], " ".repeat(gone))
            }
            _ => line.to_owned(),
        };
        let lines = text.lines().enumerate().map(without_age);
        let lines: Vec<String> = lines.map(|line| line.trim_end().to_owned()).collect();
        lines.join("\n") + "\n"
    }

    /// Returns the columns that only `-o wide` adds.
    async fn wide(&self, kind: &str) -> String {
        let text = self.get(&[kind, "-o", "wide"]).await;
        let after = text.find("AGE").unwrap() + "AGE".len();
        let cut = |line: &str| line.get(after..).unwrap_or_default().trim_end().to_owned();
        let lines: Vec<String> = text.lines().map(cut).collect();
        let indent = lines[0].len() - lines[0].trim_start().len();
        let lines = lines
            .iter()
            .map(|line| line.get(indent..).unwrap_or_default());
        lines.collect::<Vec<_>>().join(
            "
",
        ) + "
"
    }
}
