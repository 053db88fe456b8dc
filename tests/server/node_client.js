// Streams with @grpc/grpc-js: node node_client.js ADDRESS PROTO_FOLDER; prints what came as JSON.
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, folder] = process.argv.slice(2);
const definition = loader.loadSync("helios/v1/inference.proto", {
  includeDirs: [folder], keepCase: true, longs: Number, enums: String, oneofs: true,
});
const { Inference } = grpc.loadPackageDefinition(definition).helios.v1;
const client = new Inference(address, grpc.credentials.createInsecure());

const request = {
  text: "Hello", sampling: { temperature: 0, max_tokens: 12, ignore_eos: true },
};
const long = { text: "Hi", sampling: { temperature: 0, max_tokens: 1000, ignore_eos: true } };

function stream(deadlineSeconds, request, done) {
  const found = { events: [], text: "", token_ids: [], finish_reason: null };
  const deadline = new Date(Date.now() + 1000 * deadlineSeconds);
  const call = client.Generate(request, { deadline });
  call.on("data", (response) => {
    found.events.push(response.event);
    if (response.tokens) {
      found.text += response.tokens.text;
      found.token_ids.push(...response.tokens.token_ids);
    }
    if (response.finished) found.finish_reason = response.finished.outputs[0].finish_reason;
  });
  call.on("error", () => {});
  call.on("status", (status) => done({ ...found, code: status.code }));
}

stream(60, request, (found) => {
  stream(0.02, long, (late) => {
    console.log(JSON.stringify({ ...found, late: late.code }));
    client.close();
  });
});
